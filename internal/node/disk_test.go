package node

import (
	"strings"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestDisk: a disk that the node could never hold is refused, with the largest
// possible size. A disk that fits is reserved if disks are in memory. Another
// size is another revision.
func TestDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Capacity = 256 * mib })
		defer func() { _ = m.Close() }()
		spec := sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}
		for _, tt := range []struct {
			disk uint64
			want string
		}{
			{1, "resources.disk: 1 bytes are not between 16 MiB and 16777216 MiB"},
			{16*mib - 1, "resources.disk: 16777215 bytes are not between"},
			{1 << 62, "and 16777216 MiB"},
			{nodetest.MaxDisk + 1, "and 1048576 MiB: this node holds no more"},
			{192*mib + 1, "resources.disk: 201326593 bytes are not between 16 MiB and 192 MiB: it is memory on this node"},
			{1 << 40, "and 192 MiB: it is memory"},
		} {
			spec.Disk = tt.disk
			if _, err := m.ApplyTemplate(t.Context(), key("python"), spec); !sandbox.HasCode(err, sandbox.CodeInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%d bytes: %v, not %q", tt.disk, err, tt.want)
			}
		}
		var last string
		for _, disk := range []uint64{0, sandbox.MinDisk, 192 * mib} {
			spec.Disk = disk
			made, err := m.ApplyTemplate(t.Context(), key("python"), spec)
			if err != nil || made.Spec.Disk != disk || made.Revision == last {
				t.Errorf("%d bytes: %+v, %v", disk, made, err)
			}
			last = made.Revision
			if n := m.machineMemory(made.Spec); n != spec.Memory+disk {
				t.Errorf("%d bytes: %d are reserved", disk, n)
			}
		}
	})
}

// TestDiskBounds: engines can make every valid size.
func TestDiskBounds(t *testing.T) {
	spec := sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}
	for disk, valid := range map[uint64]bool{engine.MinDisk - 1: false, engine.MinDisk: true, engine.LargestDisk: true, engine.LargestDisk + 1: false} {
		spec.Disk = disk
		if err := spec.Validate(); (err == nil) != valid {
			t.Errorf("%d bytes: %v", disk, err)
		}
	}
}
