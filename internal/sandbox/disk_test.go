package sandbox

import (
	"strings"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/sandbox/sandboxtest"
)

// TestDisk: a disk is refused that the node could never hold, with what it could;
// one that fits is reserved where it is memory, and another size is another
// revision.
func TestDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := daemon(t, t.TempDir(), sandboxtest.NewHost(t), func(c *Config) { c.Capacity = 256 * mib })
		defer func() { _ = m.Close() }()
		spec := TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}
		for _, tt := range []struct {
			disk uint64
			want string
		}{
			{1, "resources.disk: 1 bytes are not between 16 MiB and 16777216 MiB"},
			{16*mib - 1, "resources.disk: 16777215 bytes are not between"},
			{1 << 62, "and 16777216 MiB"},
			{sandboxtest.MaxDisk + 1, "and 1048576 MiB: this node holds no more"},
			{192*mib + 1, "resources.disk: 201326593 bytes are not between 16 MiB and 192 MiB: it is memory on this node"},
			{1 << 40, "and 192 MiB: it is memory"},
		} {
			spec.Disk = tt.disk
			if _, err := m.ApplyTemplate(key("python"), spec); !HasCode(err, CodeInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%d bytes: %v, not %q", tt.disk, err, tt.want)
			}
		}
		var last string
		for _, disk := range []uint64{0, MinDisk, 192 * mib} {
			spec.Disk = disk
			made, err := m.ApplyTemplate(key("python"), spec)
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
