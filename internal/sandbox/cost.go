package sandbox

import "time"

// Cost is the use of resources by a sandbox at an instant. A hibernated sandbox
// uses none of those counted here.
type Cost struct {
	Sandbox
	At time.Time
	// Reserved is the memory set aside for it, including the layers that it maps.
	// Memory that several sandboxes share is counted in full for each of them here,
	// but set aside only once.
	Reserved uint64
	Stats
	Network NetworkUse
}

// NetworkUse counts the use of the network by a sandbox since its machine was
// connected.
type NetworkUse struct {
	// Sent and Received are bytes of frames, as the sandbox sees them.
	Sent, Received uint64
	// Connections counts the open TCP connections and UDP flows. Refused counts those
	// that were not allowed.
	Connections, Refused uint64
}

// Stats is the use of its host by a running sandbox. Sizes are in bytes.
type Stats struct {
	// Own is the memory of this sandbox alone, which is free when it ends. It
	// includes the guest's memory, except the pages that come from its
	// snapshot.
	Own uint64
	// Proportional is its share of all memory that it maps, including memory that
	// it shares with others.
	Proportional uint64
	// Disk is the size of the data that it has written to its disks and not
	// deleted, unless its disks are in memory.
	Disk uint64
	// CPU is the processor time that it has used since it was made.
	CPU time.Duration
	// Generation counts the forks between a boot and this sandbox.
	Generation uint64
}

// NodeStatus is the capacity of a node, and its use.
type NodeStatus struct {
	Versioned
	// ID is the node's name, Boot the boot of its host, State its state folder.
	ID, Boot, State string
	Engine          string
	CPU             CPU
	// Capacity is the memory that machines may reserve together. Reserved is
	// the memory that they have reserved.
	Capacity, Reserved uint64
	// Sandboxes counts those that have not ended. Hibernated counts those of
	// them that are on disk.
	Sandboxes, Hibernated int
	Checkpoints           int
	// CheckpointBytes is the size of all checkpoints on disk.
	CheckpointBytes uint64
	// StartsWaiting and BuildsWaiting count starts of machines and builds that
	// wait for their turn.
	StartsWaiting, BuildsWaiting int
	// Snapshots are those of the templates that are built.
	Snapshots []NodeSnapshot
	// Images are the digests of the images on the node, at most 1,000 of them.
	Images []string
	// Cordon says why the node makes no sandboxes; nil is a node that does.
	Cordon *Cordon
	// Features are the additions to the first version of its API.
	Features []string
}

// CPU is a processor as sandboxes see it.
type CPU struct {
	// Profile names the set of processor features that they see.
	Profile, Vendor string
	// Features have the names that the engine gives them.
	Features []string
}

// NodeSnapshot is the snapshot from which sandboxes of a template's revision
// are made.
type NodeSnapshot struct {
	Template Key
	Revision string
	Stage    Stage
	// Image and Digest are the digests of the image and of the snapshot.
	Image, Digest string
}

// Cordon says why a node makes no sandboxes.
type Cordon struct {
	Since time.Time `json:"since"`
	By    Principal `json:"by,omitempty"`
	// Drain says that running sandboxes are hibernated.
	Drain bool `json:"drain,omitempty"`
	// Left counts the running sandboxes that are still to be hibernated. Problems says why the
	// first of them were not.
	Left     int            `json:"-"`
	Problems []DrainProblem `json:"-"`
	// Sealed counts the hibernated sandboxes and checkpoints that hold secrets: they never
	// leave the node.
	Sealed int `json:"-"`
}

// DrainProblem is the reason why a sandbox was not hibernated.
type DrainProblem struct {
	Key
	Problem string
}
