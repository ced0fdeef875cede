package snapshot

import (
	"fmt"
	"time"

	"agentrun.dev/internal/storage/layer"
)

const (
	// Format is the version of the folder and its manifest.
	Format = 1
	// FormatPrivate is that of a folder with sealed files, which a version that
	// knows nothing of them must not take for damaged.
	FormatPrivate = 2
	// Engine names who can restore the state, and its version.
	Engine = "microvm/1"
	// EngineGVisor is the same for sandboxes on gVisor.
	EngineGVisor = "gvisor/1"
	// MaxManifest bounds manifest.json, which is read into memory.
	MaxManifest = 1 << 20
	// MaxState bounds the state, likewise.
	MaxState = 16 << 20
)

// ID is the SHA-256 of a manifest, and so of everything that it names.
type ID layer.Digest

// String is the lower-case hexadecimal form.
func (id ID) String() string { return layer.Digest(id).String() }

// ParseID accepts what String gives.
func ParseID(s string) (ID, error) {
	d, err := layer.ParseDigest(s)
	if err != nil {
		return ID{}, fmt.Errorf("snapshot id: %w", err)
	}
	return ID(d), nil
}

// Manifest describes a saved machine. It holds no path.
type Manifest struct {
	// Format and Engine are filled in by Commit if they are zero: a microVM's.
	Format int    `json:"format"`
	Engine string `json:"engine"`
	// Private says that the machine held secrets: its state and its own layers are
	// sealed, and nobody may export it. Commit fills it in.
	Private bool `json:"private,omitempty"`
	// Created is UTC in whole seconds.
	Created time.Time `json:"created"`
	// Parent is the id of the snapshot that the machine was a fork of.
	Parent string `json:"parent,omitempty"`
	// Kernel is the digest of the guest's vmlinux, TSCKHz its counter's speed:
	// of microVMs.
	Kernel   string            `json:"kernel,omitempty"`
	CPU      CPU               `json:"cpu"`
	TSCKHz   uint64            `json:"tsc_khz,omitempty"`
	VCPUs    int               `json:"vcpus"`
	Memory   Stack             `json:"memory"`
	Disks    []Disk            `json:"disks,omitempty"`
	Nets     []Net             `json:"nets,omitempty"`
	Hostname string            `json:"hostname,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
	// Session is what a fork needs to go on with a session that the guest's
	// agent holds open for it; empty when there is none.
	Session []byte `json:"session,omitempty"`
	// GVisor is there for sandboxes on gVisor, and only for them.
	GVisor *GVisor `json:"gvisor,omitempty"`
	// State is filled in by Commit.
	State Blob `json:"state"`
}

// GVisor is what only sandboxes on gVisor have. Their Memory has a size and no
// content.
type GVisor struct {
	// Helper is the digest of the program that has written the checkpoint: no
	// other reads it.
	Helper string `json:"helper"`
	// Platform is how gVisor runs programs; a checkpoint is of one.
	Platform string `json:"platform"`
	// CPUFeatures are those of the processor that programs may have found.
	CPUFeatures []string `json:"cpu_features"`
	// Disk is by how much the root may grow.
	Disk uint64 `json:"disk"`
	// Pages are the pages of memory that are in use, a layer.
	Pages Blob `json:"pages"`
}

// CPU is the processor that the machine ran on.
type CPU struct {
	// Profile names the features that the guest sees.
	Profile  string `json:"profile"`
	Vendor   string `json:"vendor"`
	Family   int    `json:"family"`
	Model    int    `json:"model"`
	Stepping int    `json:"stepping"`
	// Features are words of CPUID, by names such as "7.0.ebx": what the guest
	// may have found and used. A snapshot without them is from an older version.
	Features map[string]uint32 `json:"features,omitempty"`
}

// Disk is the content of a disk at the moment of the snapshot.
type Disk struct {
	ID       string `json:"id"`
	ReadOnly bool   `json:"read_only,omitempty"`
	Stack    Stack  `json:"image"`
}

// Net is a network device, and what it was configured with when the machine was
// booted.
type Net struct {
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	// Address has the length of its network's prefix, as in 10.0.2.15/24.
	Address string `json:"address"`
	Gateway string `json:"gateway,omitempty"`
	// Address6 and Gateway6 are the same of IPv6; snapshots from before there was any
	// have neither.
	Address6 string   `json:"address6,omitempty"`
	Gateway6 string   `json:"gateway6,omitempty"`
	DNS      []string `json:"dns,omitempty"`
}

// Blob names the content of a file.
type Blob struct {
	Digest layer.Digest `json:"digest"`
	Size   uint64       `json:"size"`
}

// Stack is a layer.Stack with names for JSON.
type Stack struct {
	Size    uint64   `json:"size"`
	Layers  []Blob   `json:"layers,omitempty"`
	Extents []Extent `json:"extents,omitempty"`
}

// Extent is a layer.Extent with names for JSON.
type Extent struct {
	Start  uint64 `json:"start"`
	Length uint64 `json:"length"`
	Layer  int    `json:"layer"`
	Offset uint64 `json:"offset"`
}

// StackOf is the form of a stack in a manifest.
func StackOf(stack layer.Stack) Stack {
	out := Stack{Size: stack.Size}
	for _, r := range stack.Layers {
		out.Layers = append(out.Layers, Blob(r))
	}
	for _, e := range stack.Extents {
		out.Extents = append(out.Extents, Extent(e))
	}
	return out
}

// Layer is the stack in the form that is worked with.
func (s Stack) Layer() layer.Stack {
	out := layer.Stack{Size: s.Size}
	for _, b := range s.Layers {
		out.Layers = append(out.Layers, layer.Ref(b))
	}
	for _, e := range s.Extents {
		out.Extents = append(out.Extents, layer.Extent(e))
	}
	return out
}

// Layers lists each layer of the snapshot once, memory first.
func (m Manifest) Layers() []layer.Ref {
	var list []layer.Ref
	seen := map[layer.Digest]bool{}
	add := func(b Blob) {
		if !seen[b.Digest] {
			seen[b.Digest] = true
			list = append(list, layer.Ref(b))
		}
	}
	for _, stack := range m.stacks() {
		for _, b := range stack.Layers {
			add(b)
		}
	}
	if m.GVisor != nil {
		add(m.GVisor.Pages)
	}
	return list
}

// stacks are the memory and the disks.
func (m Manifest) stacks() []Stack {
	list := []Stack{m.Memory}
	for _, d := range m.Disks {
		list = append(list, d.Stack)
	}
	return list
}
