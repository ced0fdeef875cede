package sandbox

// Quota bounds the use of a node by a namespace; 0 is no bound.
type Quota struct {
	Namespace Namespace `json:"namespace"`
	// Memory bounds the memory that all machines of the namespace reserve
	// together, including those that wait in pools, in bytes. A hibernated
	// sandbox reserves no memory.
	Memory uint64 `json:"memory,omitempty"`
	// Sandboxes bounds the number of sandboxes that have not ended, including
	// hibernated ones. Machines that wait in pools do not count.
	Sandboxes int `json:"sandboxes,omitempty"`
	// Storage bounds the disk space of templates, hibernated sandboxes and checkpoints of
	// the namespace together, in bytes.
	Storage uint64 `json:"storage,omitempty"`
}

// QuotaUse is a quota with its current use.
type QuotaUse struct {
	Quota
	UsedMemory    uint64
	UsedSandboxes int
	UsedStorage   uint64
}
