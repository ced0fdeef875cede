package sandbox

import "time"

// Cost is what a sandbox costs at an instant. One that is on disk costs nothing
// here.
type Cost struct {
	Sandbox
	At time.Time
	// Reserved is the memory that was set aside for it, with the layers that it maps.
	// What it shares with others is part of each of them here, and set aside once.
	Reserved uint64
	Stats
	Network NetworkUse
}

// NetworkUse is what a sandbox has done on the network since its machine was connected.
type NetworkUse struct {
	// Sent and Received are bytes of frames, as the sandbox sees them.
	Sent, Received uint64
	// Connections are TCP connections and UDP flows that are open, Refused those that
	// were not allowed.
	Connections, Refused uint64
}

// Stats is what a sandbox that runs costs its host, in bytes.
type Stats struct {
	// Own is the memory of this sandbox alone, which is free when it ends: the
	// guest's included, without what it has of its snapshot.
	Own uint64
	// Proportional is its share of all memory that it maps, what it has in common
	// with others included.
	Proportional uint64
	// Disk is what it has written to its disks and not deleted, where these are
	// not in its memory.
	Disk uint64
	// CPU is the processor time that it has taken since it was made.
	CPU time.Duration
	// Generation counts the forks between a boot and this sandbox.
	Generation uint64
}

// NodeStatus is what a node has, and what of it is taken.
type NodeStatus struct {
	Versioned
	// ID is the node's name, Boot the boot of its host, State its state folder.
	ID, Boot, State string
	Engine          string
	CPU             CPU
	// Capacity is the memory that machines may reserve together, Reserved what
	// they have.
	Capacity, Reserved uint64
	// Sandboxes have not ended; Hibernated are those of them that are on disk.
	Sandboxes, Hibernated int
	Checkpoints           int
	// CheckpointBytes is what checkpoints take on disk together.
	CheckpointBytes uint64
	// StartsWaiting and BuildsWaiting are how many wait for their turn.
	StartsWaiting, BuildsWaiting int
	// Snapshots are those of the templates that are built.
	Snapshots []NodeSnapshot
	// Images are the digests of the images on the node, at most 1,000 of them.
	Images []string
	// Cordon is why the node takes nothing new; nil is a node that does.
	Cordon *Cordon
	// Features are what its API has beyond the first version of that.
	Features []string
}

// CPU is a processor as sandboxes see it.
type CPU struct {
	// Profile says which features of the processor they see.
	Profile, Vendor string
	// Features have the names that the engine gives them.
	Features []string
}

// NodeSnapshot is what sandboxes of a template's revision are made of.
type NodeSnapshot struct {
	Template Key
	Revision string
	Stage    Stage
	// Image and Digest are the digests of the image and of the snapshot.
	Image, Digest string
}

// Cordon is why a node takes nothing new.
type Cordon struct {
	Since time.Time `json:"since"`
	By    Principal `json:"by,omitempty"`
	// Drain says that what runs is hibernated.
	Drain bool `json:"drain,omitempty"`
	// Left is how many run that are to be hibernated, Problems why the first of them were not.
	Left     int            `json:"-"`
	Problems []DrainProblem `json:"-"`
	// Sealed is how many hibernated sandboxes and checkpoints hold secrets: they never leave the
	// node.
	Sealed int `json:"-"`
}

// DrainProblem is why a sandbox was not hibernated.
type DrainProblem struct {
	Key
	Problem string
}
