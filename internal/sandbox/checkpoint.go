package sandbox

import (
	"errors"
	"time"
)

// Checkpoint is a sandbox as it was at one instant, on disk. It needs neither
// the sandbox nor its template, and any number of sandboxes can be made of it.
type Checkpoint struct {
	Key
	Versioned
	// ID is never used again; it is the folder's name, too.
	ID ID `json:"id"`
	// Phase is Pending while it is being written: an intent.
	Phase   Phase     `json:"phase"`
	Created time.Time `json:"created"`
	// Of is the sandbox as it was, without what it ran on.
	Of Sandbox `json:"of"`
	// Kept is what it takes on disk beyond its template, in bytes.
	Kept uint64 `json:"kept,omitempty"`
}

// Size is what a folder takes on disk, in bytes. The journal has it under these names.
type Size struct {
	// Stored is all that is in it, Unshared what deleting it frees.
	Stored   uint64 `json:"Stored"`
	Unshared uint64 `json:"Unshared"`
}

// CheckpointSize is a checkpoint and what it takes on disk, in bytes. What it
// has in common with templates, sandboxes and other checkpoints is not part of
// Unshared, which is what deleting it frees.
type CheckpointSize struct {
	Checkpoint
	Size
}

// Ready reports whether it is complete.
func (c Checkpoint) Ready() bool { return c.Phase == PhaseReady }

// RestoreSpec is what a sandbox that is made of a checkpoint is given, as a claim
// gives it. Env is laid over the environment that it had.
type RestoreSpec struct {
	Env      Env               `json:"env,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Lifetime
}

// Validate refuses a restore that no checkpoint can serve.
func (r RestoreSpec) Validate() error {
	return errors.Join(r.Env.Validate(), validateMetadata(r.Metadata), r.Lifetime.Validate())
}
