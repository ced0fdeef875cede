package jail

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/cgroups/v3"
)

// TestIO: the cgroup shows the limits of a process for a disk, also after a
// change. For cgroups v1, which would not enforce them, CheckIO reports so.
func TestIO(t *testing.T) {
	cfg := config(t)
	j := open(t, cfg)
	if cgroups.Mode() != cgroups.Unified {
		l := roomy
		l.IO = IO{Device: Device{8, 0}, BytesPerSecond: mib}
		start(t, j, l).end(t, true)
		if err := j.CheckIO(l.IO.Device); err == nil || !strings.Contains(err.Error(), "cgroups v1") {
			t.Errorf("cgroups v1 bound a disk: %v", err)
		}
		return
	}
	folder, disk := onPartition(t)
	device, err := DeviceOf(folder)
	if err != nil {
		t.Fatal(err)
	}
	numbers, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(disk), "dev"))
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.TrimSpace(string(numbers)); device.String() != want {
		t.Fatalf("a partition of %s is on device %s, want %s", disk, device, want)
	}
	if err := j.CheckIO(device); err != nil {
		t.Error(err)
	}
	limits := roomy
	limits.IO = IO{Device: device, BytesPerSecond: 3 * mib}
	p := start(t, j, limits)
	check := func(want string) {
		t.Helper()
		b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", cfg.Cgroup, groupName(p.Cell.UID()), "io.max"))
		if err != nil {
			t.Fatal(err)
		}
		if want != "" {
			want = device.String() + " " + want
		}
		if got := strings.TrimSpace(string(b)); got != want {
			t.Errorf("io.max is %q, want %q", got, want)
		}
	}
	check("rbps=3145728 wbps=3145728 riops=max wiops=max")
	for _, step := range []struct {
		io   IO
		want string
	}{
		{IO{Device: device, BytesPerSecond: 2 * mib, OpsPerSecond: 70}, "rbps=2097152 wbps=2097152 riops=70 wiops=70"},
		{IO{}, "rbps=2097152 wbps=2097152 riops=70 wiops=70"},
		{IO{Device: device, BytesPerSecond: 1}, "rbps=2 wbps=2 riops=max wiops=max"},
		{IO{Device: Device{4095, 7}, BytesPerSecond: 1}, "rbps=2 wbps=2 riops=max wiops=max"}, // no such device
		{IO{Device: device}, ""},
	} {
		limits.IO = step.io
		if err := p.Cell.Limit(limits); err != nil {
			t.Fatalf("%+v: %v", step.io, err)
		}
		check(step.want)
	}
	p.end(t, true)
}

// TestNoDevice: a file in memory has no disk, and CheckIO reports so.
func TestNoDevice(t *testing.T) {
	f, err := os.Open("/dev/shm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	device, err := DeviceOf(f)
	if err != nil || device != (Device{}) {
		t.Errorf("a tmpfs is on %v, %v", device, err)
	}
	if err := open(t, config(t)).CheckIO(device); err == nil {
		t.Error("what is on no disk is bounded")
	}
}

// onPartition mounts the only partition of a disk that is a file.
func onPartition(t *testing.T) (folder *os.File, disk string) {
	t.Helper()
	file, mount := filepath.Join(t.TempDir(), "disk"), t.TempDir()
	const start, size = mib, 16 * mib
	run(t, "modprobe", "-a", "loop", "ext4")
	run(t, "truncate", "-s", "32M", file)
	run(t, "mke2fs", "-q", "-F", "-t", "ext4", "-E", "offset=1048576", file, "16M")
	// A partition table with one entry (the PC's: status, first, type, last, LBA of
	// the first sector, number of sectors).
	table := make([]byte, 512)
	copy(table[446:], []byte{0, 0, 0, 0, 0x83, 0, 0, 0, 0, start / 512 >> 8, 0, 0, 0, size / 512 >> 8, 0, 0})
	copy(table[510:], []byte{0x55, 0xaa})
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(table, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	disk = run(t, "losetup", "--find", "--show", "--partscan", file)
	t.Cleanup(func() { run(t, "losetup", "--detach", disk) })
	run(t, "mount", disk+"p1", mount)
	t.Cleanup(func() { run(t, "umount", mount) })
	if folder, err = os.Open(mount); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = folder.Close() })
	return folder, disk
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
	return strings.TrimSpace(string(out))
}
