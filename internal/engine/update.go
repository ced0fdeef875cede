package engine

import "agentrun.dev/internal/storage/snapshot"

// Outdater is an engine whose snapshots age: AgentRun may be updated after they were made.
type Outdater interface {
	// Outdated says why a snapshot of a template, which Fits, is to be made anew; empty if
	// this AgentRun would make it so, too.
	Outdated(snapshot.Manifest) (why string, _ error)
}

// Outdated does so on any engine.
func Outdated(e Engine, m snapshot.Manifest) (why string, err error) {
	if o, ok := e.(Outdater); ok {
		return o.Outdated(m)
	}
	return "", nil
}

// ProgramKeeper is an engine that keeps programs of earlier AgentRuns, without which it
// could not restore the snapshots that they have made.
type ProgramKeeper interface {
	// KeepPrograms deletes those that neither a sandbox that it runs nor one of the listed
	// snapshots needs. What is needed later than list is called is in a snapshot that is
	// listed, or is of a sandbox that runs.
	KeepPrograms(list func() (snapshots []string, err error)) error
}

// KeepPrograms does so on any engine.
func KeepPrograms(e Engine, list func() (snapshots []string, err error)) error {
	if k, ok := e.(ProgramKeeper); ok {
		return k.KeepPrograms(list)
	}
	return nil
}
