package microvm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/microvm"
	"github.com/containerd/cgroups/v3"
)

// TestIOLimit: a guest's disk transfers keep to the limit of its fork. They are
// compared with transfers of the same guest without a limit, so the speed of
// the machine does not matter.
func TestIOLimit(t *testing.T) {
	e := newEngine(t)
	source, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1, Scratch: 64 * mib})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	snap, err := source.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	fork := func(l engine.IOLimits) engine.Sandbox {
		t.Helper()
		sb, err := e.Fork(t.Context(), snap, engine.ForkOptions{Limits: engine.Limits{IO: l}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sb.Close() })
		return sb
	}
	// A limit admits one second's worth at once, so it must be much less than
	// the size of a transfer.
	const size, times = 8 * mib, 8
	free := fork(engine.IOLimits{})
	for _, tt := range []struct {
		name string
		dd   string
	}{
		{"write", "if=/dev/zero of=/dev/vdb conv=fsync"},
		{"read", "if=/dev/vdb of=/dev/null"},
	} {
		unlimited := transfer(t, free, tt.dd, size)
		rate := size / (times*unlimited + 1)
		limited := fork(engine.IOLimits{BytesPerSecond: uint64(rate)})
		took := transfer(t, limited, tt.dd, size)
		t.Logf("%s: %d MiB in %.2f s, with a limit of %.2f MiB/s in %.2f s", tt.name, size/mib, unlimited, rate/mib, took)
		if ratio := took / unlimited; ratio < times/2 {
			t.Errorf("%s: a limit of %.0f bytes per second makes it %.1f times as slow, not %d times", tt.name, rate, ratio, times)
		}
		// In any case a guest cannot transfer more than the limit, plus one
		// second's worth, plus the request that exceeds it.
		if most := rate*(took+1) + mib; size > most {
			t.Errorf("%s: %d bytes in %.2f s under a limit of %.0f per second", tt.name, size, took, rate)
		}
		if err := limited.Close(); err != nil {
			t.Error(err)
		}
	}
}

// transfer makes a guest copy that many bytes without its cache, and returns
// the seconds by the guest's clock.
func transfer(t *testing.T, sb engine.Sandbox, dd string, size int) float64 {
	t.Helper()
	out := command(t, sb, fmt.Sprintf("sync; echo 3 > /proc/sys/vm/drop_caches; cat /proc/uptime; dd %s bs=64k count=%d 2>/dev/null; cat /proc/uptime", dd, size/(64<<10)))
	var before, after, idle float64
	if _, err := fmt.Sscan(out, &before, &idle, &after); err != nil || after < before {
		t.Fatalf("the guest says %q: %v", out, err)
	}
	return max(after-before, 0.01) // the clock's resolution
}

// TestIOLimitOfDevice: if the disks of sandboxes are on a block device, their
// cgroups limit it as well, for a booted and for a forked sandbox.
func TestIOLimitOfDevice(t *testing.T) {
	e, err := microvm.New(microvm.Config{Resident: enginetest.TempDir(t), Scratch: onDevice(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	limits := engine.Limits{IO: engine.IOLimits{BytesPerSecond: 10 * mib, OpsPerSecond: 500}}
	source, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1, Scratch: 8 * mib, Limits: limits})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	bounded(t, source, "rbps=20971520 wbps=20971520 riops=1000 wiops=1000")
	snap, err := source.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	for _, tt := range []struct {
		limits engine.Limits
		want   string
	}{
		{engine.Limits{}, ""},
		{engine.Limits{IO: engine.IOLimits{OpsPerSecond: 300}}, "rbps=max wbps=max riops=600 wiops=600"},
	} {
		sb, err := e.Fork(t.Context(), snap, engine.ForkOptions{Limits: tt.limits})
		if err != nil {
			t.Fatal(err)
		}
		bounded(t, sb, tt.want)
		command(t, sb, "dd if=/dev/zero of=/dev/vdb bs=64k count=16 conv=fsync 2>/dev/null")
		if err := sb.Close(); err != nil {
			t.Error(err)
		}
	}
}

// bounded checks the limit of the one device in a sandbox's cgroup. With cgroups
// v1 there is no such limit.
func bounded(t *testing.T, sb engine.Sandbox, want string) {
	t.Helper()
	if cgroups.Mode() != cgroups.Unified {
		return
	}
	id, err := microvm.Identify(sb)
	if err != nil {
		t.Fatal(err)
	}
	group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", id.PID))
	if err != nil {
		t.Fatal(err)
	}
	_, path, _ := strings.Cut(strings.TrimSpace(string(group)), "::")
	got, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", path, "io.max"))
	if err != nil {
		t.Fatal(err)
	}
	if _, limits, _ := strings.Cut(strings.TrimSpace(string(got)), " "); limits != want {
		t.Errorf("io.max is %q, want a device and %q", got, want)
	}
}

// onDevice mounts a file system on a block device.
func onDevice(t *testing.T) string {
	t.Helper()
	file, mount := filepath.Join(enginetest.TempDir(t), "disk"), t.TempDir()
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
	}
	run("modprobe", "-a", "loop", "ext4")
	run("truncate", "-s", "64M", file)
	run("mke2fs", "-q", "-F", "-t", "ext4", file)
	run("mount", "-o", "loop", file, mount)
	t.Cleanup(func() { run("umount", mount) })
	return mount
}
