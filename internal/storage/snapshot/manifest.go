package snapshot

import (
	"fmt"
	"time"

	"agentrun.dev/internal/storage/layer"
)

const (
	// Format is the version of the folder and its manifest.
	Format = 1
	// FormatPrivate is the format of a folder with sealed files. Versions that
	// do not know such files then refuse the format, and do not report damage.
	FormatPrivate = 2
	// Engine names the engine that can restore the state, and the state's
	// version.
	Engine = "microvm/1"
	// EngineGVisor is the same for sandboxes on gVisor.
	EngineGVisor = "gvisor/1"
	// MaxManifest bounds manifest.json, which is read into memory.
	MaxManifest = 1 << 20
	// MaxState bounds the state, which is read into memory.
	MaxState = 16 << 20
)

// ID is the SHA-256 of a manifest, which covers everything that the manifest
// names.
type ID layer.Digest

// String returns the lower-case hexadecimal form.
func (id ID) String() string { return layer.Digest(id).String() }

// ParseID accepts the form that String returns.
func ParseID(s string) (ID, error) {
	d, err := layer.ParseDigest(s)
	if err != nil {
		return ID{}, fmt.Errorf("snapshot id: %w", err)
	}
	return ID(d), nil
}

// Manifest describes a saved machine. It holds no path.
type Manifest struct {
	// If Format and Engine are zero, Commit sets them to those of a microVM.
	Format int    `json:"format"`
	Engine string `json:"engine"`
	// Private says that the machine held secrets: its state and its own layers are
	// sealed, and it cannot be exported. Commit sets it.
	Private bool `json:"private,omitempty"`
	// Created is UTC in whole seconds.
	Created time.Time `json:"created"`
	// Parent is the id of the snapshot that the machine was forked from.
	Parent string `json:"parent,omitempty"`
	// Kernel is the digest of the guest's vmlinux, TSCKHz the frequency of its
	// time-stamp counter. Only microVMs have them.
	Kernel   string            `json:"kernel,omitempty"`
	CPU      CPU               `json:"cpu"`
	TSCKHz   uint64            `json:"tsc_khz,omitempty"`
	VCPUs    int               `json:"vcpus"`
	Memory   Stack             `json:"memory"`
	Disks    []Disk            `json:"disks,omitempty"`
	Nets     []Net             `json:"nets,omitempty"`
	Hostname string            `json:"hostname,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
	// Session lets a fork continue a session that the guest's agent keeps open
	// for it. It is empty without such a session.
	Session []byte `json:"session,omitempty"`
	// GVisor is set for sandboxes on gVisor, and only for them.
	GVisor *GVisor `json:"gvisor,omitempty"`
	// State is set by Commit.
	State Blob `json:"state"`
}

// GVisor holds the fields that only sandboxes on gVisor have. Their Memory has
// a size but no content.
type GVisor struct {
	// Helper is the digest of the program that wrote the checkpoint. No other
	// program reads it.
	Helper string `json:"helper"`
	// Platform is how gVisor runs programs. A checkpoint works only on its own
	// platform.
	Platform string `json:"platform"`
	// CPUFeatures are the processor's features, which programs may have
	// detected.
	CPUFeatures []string `json:"cpu_features"`
	// Disk is the number of bytes by which the root may grow.
	Disk uint64 `json:"disk"`
	// Pages is the layer with the pages of memory that are in use.
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
	// Features are words of CPUID, by names such as "7.0.ebx", which the guest
	// may have read and used. Snapshots of older versions lack them.
	Features map[string]uint32 `json:"features,omitempty"`
}

// Disk is the content of a disk at the moment of the snapshot.
type Disk struct {
	ID       string `json:"id"`
	ReadOnly bool   `json:"read_only,omitempty"`
	Stack    Stack  `json:"image"`
}

// Net is a network device, with its configuration from the boot of the machine.
type Net struct {
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	// Address includes the prefix length of its network, as in 10.0.2.15/24.
	Address string `json:"address"`
	Gateway string `json:"gateway,omitempty"`
	// Address6 and Gateway6 are the same for IPv6. Snapshots from before IPv6 was
	// supported have neither.
	Address6 string   `json:"address6,omitempty"`
	Gateway6 string   `json:"gateway6,omitempty"`
	DNS      []string `json:"dns,omitempty"`
}

// Blob identifies the content of a file.
type Blob struct {
	Digest layer.Digest `json:"digest"`
	Size   uint64       `json:"size"`
}

// Stack is a layer.Stack in its JSON form.
type Stack struct {
	Size    uint64   `json:"size"`
	Layers  []Blob   `json:"layers,omitempty"`
	Extents []Extent `json:"extents,omitempty"`
}

// Extent is a layer.Extent in its JSON form.
type Extent struct {
	Start  uint64 `json:"start"`
	Length uint64 `json:"length"`
	Layer  int    `json:"layer"`
	Offset uint64 `json:"offset"`
}

// StackOf converts a stack to its form in a manifest.
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

// Layer converts the stack to the type that package layer works with.
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
