package microvm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

// disk makes a file of n bytes and opens it twice: for the guest and for the
// test.
func disk(t *testing.T, n int64, content io.Reader) (guest, host *os.File) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	host, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = host.Close() })
	if content != nil {
		if _, err := io.CopyN(host, content, n); err != nil {
			t.Fatal(err)
		}
	}
	if err := host.Truncate(n); err != nil {
		t.Fatal(err)
	}
	guest, err = os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = guest.Close() })
	return guest, host
}

func digest(t *testing.T, f *os.File, off, n int64) string {
	t.Helper()
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, off, n)); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// TestDisks: data that the guest writes and flushes is in the host's file, and
// the guest reads the data of the host's file. A read-only disk stays
// unchanged, and discarded blocks are returned to the host.
func TestDisks(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		const size = 32 * mib
		rw, rwHost := disk(t, size, nil)
		ro, roHost := disk(t, size, &pattern{state: 1})
		g := boot(t, vcpus, func(s *engine.Spec) {
			s.Files = []engine.FileDisk{{File: rw, ID: "writable"}, {File: ro, ReadOnly: true, ID: "fixed"}}
		})
		if got := g.sh(t, "cat /sys/block/vdb/serial /sys/block/vdc/serial /sys/block/vdc/ro"); got != "writablefixed1" && got != "writable\nfixed\n1" {
			t.Errorf("serials and ro flag read %q", got)
		}
		got, _, _ := strings.Cut(g.sh(t, "dd if=/dev/vdc bs=1M 2>/dev/null | sha256sum"), " ")
		want := digest(t, roHost, 0, size)
		if got != want {
			t.Errorf("the guest reads digest %s, the file has %s", got, want)
		}
		if out := g.sh(t, "dd if=/dev/zero of=/dev/vdc bs=4096 count=1 conv=fsync 2>&1; echo $?"); strings.HasSuffix(out, "\n0") {
			t.Errorf("a write to a read-only disk succeeded: %s", out)
		}
		if again := digest(t, roHost, 0, size); again != want {
			t.Error("the read-only disk has changed")
		}

		out := g.sh(t, "head -c 8388608 /dev/urandom > /tmp/x && dd if=/tmp/x of=/dev/vdb bs=64k seek=16 conv=fsync 2>/dev/null && sha256sum /tmp/x")
		got, _, _ = strings.Cut(out, " ")
		if have := digest(t, rwHost, 16*64<<10, 8*mib); have != got {
			t.Errorf("after fsync the host's file has digest %s, the guest wrote %s", have, got)
		}
		before := blocks(t, rwHost)
		g.sh(t, "blkdiscard /dev/vdb")
		if after := blocks(t, rwHost); after >= before || after > 1*mib/512 {
			t.Errorf("discard left %d of %d blocks", after, before)
		}
		if zeros := digest(t, rwHost, 0, size); zeros != fmt.Sprintf("%x", sha256.Sum256(make([]byte, size))) {
			t.Error("the discarded disk does not read as zeros")
		}
	})
}

func blocks(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks
}

// TestFilesystem mounts ext4 from a disk, uses it, and finds it clean.
func TestFilesystem(t *testing.T) {
	rw, _ := disk(t, 64*mib, nil)
	g := boot(t, 2, func(s *engine.Spec) { s.Files = []engine.FileDisk{{File: rw}} })
	g.sh(t, "mke2fs -F /dev/vdb >/dev/null 2>&1 && mkdir -p /mnt && mount -t ext4 /dev/vdb /mnt")
	g.sh(t, "i=0; while [ $i -lt 200 ]; do mkdir -p /mnt/d$((i%%7)); echo $i > /mnt/d$((i%%7))/f$i; i=$((i+1)); done; sync")
	if got := g.sh(t, "umount /mnt && mount -t ext4 -o ro /dev/vdb /mnt && cat /mnt/d*/f* | wc -l"); got != "200" {
		t.Errorf("%s files are left after remounting, want 200", got)
	}
	if bad := g.sh(t, "dmesg | grep -ci 'ext4-fs error' || true"); bad != "0" {
		t.Errorf("%s errors of ext4 in the kernel log", bad)
	}
}

// TestClock: guests use kvm-clock, know the time, and sleep for the requested
// time.
func TestClock(t *testing.T) {
	forEachSMP(t, func(t *testing.T, vcpus int) {
		g := boot(t, vcpus)
		if got := g.sh(t, "cat /sys/devices/system/clocksource/clocksource0/current_clocksource"); got != "kvm-clock" {
			t.Errorf("clock source is %q, want kvm-clock: the profile hides the invariant TSC for it", got)
		}
		before := time.Now().Unix()
		now, err := strconv.ParseInt(g.sh(t, "date +%%s"), 10, 64)
		after := time.Now().Unix()
		if err != nil || now < before-1 || now > after+1 {
			t.Errorf("the guest's time is %d, %v; the host's between %d and %d", now, err, before, after)
		}
		// Monotonic time compared with the host's, as a ratio over a sleep.
		start := time.Now()
		spent := g.sh(t, "a=$(cut -d' ' -f1 /proc/uptime); sleep 1; b=$(cut -d' ' -f1 /proc/uptime); echo $a $b")
		host := time.Since(start).Seconds()
		var a, b float64
		if _, err := fmt.Sscan(spent, &a, &b); err != nil {
			t.Fatal(err)
		}
		if guest := b - a; guest < 0.95 || guest > host*1.05 {
			t.Errorf("a sleep of 1 s took %.2f s of the guest's time, within %.2f s of the host's", guest, host)
		}
	})
}

// TestProfile: the guest does not see features that the CPU profile hides.
func TestProfile(t *testing.T) {
	g := boot(t, 2)
	flags := strings.Fields(g.sh(t, "grep -m1 ^flags /proc/cpuinfo"))
	for _, f := range flags {
		switch f {
		case "svm", "vmx", "nonstop_tsc", "amx_tile", "sgx", "topoext", "monitor", "perfctr_core":
			t.Errorf("the guest sees the CPU flag %s", f)
		}
	}
	if !strings.Contains(strings.Join(flags, " "), "hypervisor") {
		t.Error("the guest does not know that it is one")
	}
	for _, bad := range []string{"WARNING: CPU", "BUG:", "soft lockup", "rcu_sched self-detected", "ACPI Error", "ACPI BIOS Error"} {
		if n := g.sh(t, "dmesg | grep -c '%s' || true", bad); n != "0" {
			t.Errorf("the kernel log has %q:\n%s", bad, g.sh(t, "dmesg | grep -A3 '%s'", bad))
		}
	}
}

// TestGenerationID: the kernel finds the generation id, and reseeds its random
// number generator when the id changes.
func TestGenerationID(t *testing.T) {
	g := boot(t, 1)
	const said = "crng reseeded due to virtual machine fork"
	if n := g.sh(t, "dmesg | grep -c '%s' || true", said); n != "0" {
		t.Fatalf("reseeded %s times before anything happened", n)
	}
	if err := g.process.RenewGenerationID(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the kernel reseeds", func() bool {
		return g.sh(t, "dmesg | grep -c '%s' || true", said) == "1"
	})
}

// eventually asks the guest repeatedly. Each question is an exec, so no timer
// is needed. The deadline is for a stuck test.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("waited a minute in vain: %s", what)
		}
	}
}

func TestEntropy(t *testing.T) {
	g := boot(t, 1)
	if got := g.sh(t, "cat /sys/class/misc/hw_random/rng_current"); !strings.HasPrefix(got, "virtio_rng") {
		t.Errorf("hardware generator is %q", got)
	}
	a, b := g.sh(t, "head -c 4096 /dev/hwrng | sha256sum"), g.sh(t, "head -c 4096 /dev/hwrng | sha256sum")
	if a == b {
		t.Error("the same random bytes twice")
	}
}

// privateKiB returns the private memory of a guest's vmm process.
func privateKiB(t *testing.T, g *testGuest) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", g.process.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(f[0], "Private_") {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			total += n
		}
	}
	return total
}

// TestMemoryComesBack: memory that the guest has freed, and memory that the
// balloon took, returns to the host.
func TestMemoryComesBack(t *testing.T) {
	g := boot(t, 2, func(s *engine.Spec) { s.Memory = 512 * mib })
	idle := privateKiB(t, g)
	g.sh(t, "dd if=/dev/zero of=/dev/shm/ballast bs=1M count=200 2>/dev/null")
	full := privateKiB(t, g)
	if full-idle < 190<<10 {
		t.Fatalf("200 MiB written, but the process grew from %d to %d KiB only", idle, full)
	}
	g.sh(t, "rm /dev/shm/ballast")
	eventually(t, "free pages are reported to the host", func() bool { return privateKiB(t, g) < full-150<<10 })

	free := func() int {
		n, err := strconv.Atoi(g.sh(t, "awk '/^MemFree/{print $2}' /proc/meminfo"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := free()
	if err := g.process.SetBalloon(t.Context(), 128*mib); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the balloon takes 128 MiB", func() bool { return free() < before-120<<10 })
	if err := g.process.SetBalloon(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the balloon gives them back", func() bool { return free() > before-20<<10 })
}

// TestConsoleSpam: a guest that prints without end costs no memory and does not
// delay the agent. The end of its output is kept.
func TestConsoleSpam(t *testing.T) {
	g := boot(t, 2)
	before := privateKiB(t, g)
	g.sh(t, "dd if=/dev/zero bs=1k count=%d 2>/dev/null | tr '\\0' x > /dev/console; echo the end > /dev/console", soak.Count(1024, 8))
	// A write to a terminal returns before the driver has sent everything.
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	defer cancel()
	for ended := false; !ended; {
		console, err := g.Console(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(console) > 64<<10 {
			t.Fatalf("console tail has %d bytes", len(console))
		}
		ended = bytes.Contains(console, []byte("the end"))
		if err := g.Agent().Ping(ctx); err != nil {
			t.Fatalf("%v; console tail has %d bytes and ends with %q", err, len(console), console[max(0, len(console)-20):])
		}
	}
	if grown := privateKiB(t, g) - before; grown > 16<<10 {
		t.Errorf("the process grew by %d KiB", grown)
	}
}

// TestPauseLinux: a paused guest stops, and continues when it is resumed.
func TestPauseLinux(t *testing.T) {
	forEachSMP(t, func(t *testing.T, vcpus int) {
		g := boot(t, vcpus)
		x, err := g.Agent().Exec(t.Context(), shell("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo $i"))
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			if err := g.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := g.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		out, err := io.ReadAll(x.Stdout())
		if err != nil || strings.TrimSpace(string(out)) != "200000" {
			t.Fatalf("counted to %q, %v", out, err)
		}
	})
}
