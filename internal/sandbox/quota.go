package sandbox

// Quota bounds what a namespace may use; 0 is no bound.
type Quota struct {
	Namespace Namespace `json:"namespace"`
	// Memory is what the machines of the namespace may reserve together, those
	// that wait in pools included, in bytes. A hibernated sandbox reserves none.
	Memory uint64 `json:"memory,omitempty"`
	// Sandboxes is how many there may be that have not ended, hibernated ones
	// included. What waits in pools is none yet.
	Sandboxes int `json:"sandboxes,omitempty"`
	// Storage is what templates, hibernated sandboxes and checkpoints of the namespace may
	// take on disk together, in bytes.
	Storage uint64 `json:"storage,omitempty"`
}

// QuotaUse is what a namespace uses of its quota.
type QuotaUse struct {
	Quota
	UsedMemory    uint64
	UsedSandboxes int
	UsedStorage   uint64
}
