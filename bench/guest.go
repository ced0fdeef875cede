package bench

import (
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
)

// Guest describes the sandboxes of a benchmark.
type Guest struct {
	// Root is an EROFS file with the root filesystem. It is empty for the bare guest,
	// and for benchmarks that take an image.
	Root   string
	Memory uint64
	VCPUs  int
	// Folder is for snapshots and disks.
	Folder string
	// Engine is the engine to measure; empty is the microVM's.
	Engine pick.Kind
	Jail   microvm.JailPolicy
}

func (g *Guest) engine() pick.Kind {
	if g.Engine == "" {
		return pick.MicroVM
	}
	return g.Engine
}
