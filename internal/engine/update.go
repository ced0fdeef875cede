package engine

import "agentrun.dev/internal/storage/snapshot"

// Outdater is an engine whose snapshots age, since AgentRun may be updated after they
// were made.
type Outdater interface {
	// Outdated returns why a template's snapshot is to be made anew, although it
	// Fits. The reason is empty if this AgentRun would make the same snapshot.
	Outdated(snapshot.Manifest) (why string, _ error)
}

// Outdated asks any engine, whether or not it is an Outdater.
func Outdated(e Engine, m snapshot.Manifest) (why string, err error) {
	if o, ok := e.(Outdater); ok {
		return o.Outdated(m)
	}
	return "", nil
}

// ProgramKeeper is an engine that keeps programs of earlier AgentRuns. Without them
// it could not restore the snapshots that those AgentRuns have made.
type ProgramKeeper interface {
	// KeepPrograms deletes the programs that neither a running sandbox nor a listed
	// snapshot needs. A program that becomes needed after the call of list belongs to
	// a listed snapshot or to a running sandbox, so it is kept.
	KeepPrograms(list func() (snapshots []string, err error)) error
}

// KeepPrograms asks any engine, whether or not it is a ProgramKeeper.
func KeepPrograms(e Engine, list func() (snapshots []string, err error)) error {
	if k, ok := e.(ProgramKeeper); ok {
		return k.KeepPrograms(list)
	}
	return nil
}
