package sandbox

import (
	"errors"
	"time"
)

// Checkpoint is the state of a sandbox at one instant, on disk. It needs
// neither the sandbox nor its template, and any number of sandboxes can be made
// of it.
type Checkpoint struct {
	Key
	Versioned
	// ID is never used again. It is the folder's name, too.
	ID ID `json:"id"`
	// Phase is Pending while the checkpoint is being written: an intent.
	Phase   Phase     `json:"phase"`
	Created time.Time `json:"created"`
	// Of is the record of the sandbox at that instant, without its machine.
	Of Sandbox `json:"of"`
	// Kept is the space on disk that it needs beyond its template, in bytes.
	Kept uint64 `json:"kept,omitempty"`
}

// Size is the size of a folder on disk, in bytes. The journal uses these names.
type Size struct {
	// Stored is the size of all files in it. Unshared is the space that
	// deleting it frees.
	Stored   uint64 `json:"Stored"`
	Unshared uint64 `json:"Unshared"`
}

// CheckpointSize is a checkpoint with its size on disk. Unshared does not
// include files that it shares with templates, sandboxes and other checkpoints.
type CheckpointSize struct {
	Checkpoint
	Size
}

// Ready reports whether it is complete.
func (c Checkpoint) Ready() bool { return c.Phase == PhaseReady }

// RestoreSpec has the settings of a sandbox that is made of a checkpoint; they
// mean the same as in a claim. Env is laid over the environment that the
// checkpoint has.
type RestoreSpec struct {
	Env      Env               `json:"env,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Lifetime
}

// Validate refuses a restore that no checkpoint can serve.
func (r RestoreSpec) Validate() error {
	return errors.Join(r.Env.Validate(), validateMetadata(r.Metadata), r.Lifetime.Validate())
}
