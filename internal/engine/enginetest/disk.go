package enginetest

import (
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/snapshot"
)

// diskSize is the size of the disk in testDisk. It differs from half of the memory,
// and is no multiple of the page size.
const diskSize = 24<<20 + 1000

// testDisk: the writable layer of a sandbox has exactly the size that was asked for,
// and is the sandbox's own, in forks of all kinds.
func (s *suite) testDisk(t *testing.T) {
	spec := s.Spec
	spec.Disk, spec.Scratch = diskSize, 0
	source, err := s.Engine.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	wantDisk(t, source, "what was booted")
	s.fillDisk(t, source, "what was booted")
	// The layer is over the image: the image's files are there and can be changed.
	sum := sh(t, source, "head -c 3000000 /dev/urandom > /data; md5sum < /data; echo changed > /etc/passwd; rm -r /var; mkdir /var; ls /var")
	sh(t, source, "sync")
	s.wantUse(t, source, "what was booted", 3_000_000, diskSize/2)
	check := func(sb engine.Sandbox, who, its string) {
		t.Helper()
		if got := sh(t, sb, "md5sum < /data; cat /etc/passwd; ls /var; cat /who"); got != sum+"\nchanged\n"+its {
			t.Errorf("%s holds %q", who, got)
		}
	}
	capture := func(sb engine.Sandbox, name string) *snapshot.Snapshot {
		t.Helper()
		snap, err := sb.Snapshot(t.Context(), filepath.Join(s.dir, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = snap.Close() })
		return snap
	}

	// Live forks of a sandbox that has no snapshot yet.
	sh(t, source, "echo source > /who")
	children, _ := liveFork(t, source, engine.ForkOptions{}, engine.ForkOptions{})
	sh(t, children[0], "echo child > /who")
	check(source, "the source", "source")
	check(children[0], "its live fork", "child")
	check(children[1], "its other live fork", "source")
	wantDisk(t, children[0], "a live fork")

	snap := capture(source, "disk")
	dir := folder(t)
	a := s.fork(t, snap, engine.ForkOptions{Folder: dir})
	b := s.fork(t, snap, engine.ForkOptions{})
	sh(t, a, "echo a > /who")
	sh(t, b, "echo b > /who; rm /data")
	wantDisk(t, a, "a fork")
	check(a, "a fork", "a")
	check(source, "the source", "source")
	if got := sh(t, b, "cat /who; ls /data 2>/dev/null; echo gone"); got != "b\ngone" {
		t.Errorf("what has deleted a file holds %q", got)
	}

	// A fork is forked while it runs, left, adopted, and hibernated.
	children, _ = liveFork(t, a, engine.ForkOptions{})
	check(children[0], "a live fork of a fork", "a")
	a = s.leave(t, a, dir)
	resume(t, a)
	sh(t, a, "echo awake > /who")
	if err := a.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	asleep := capture(a, "disk-asleep")
	if err := s.Engine.Remove(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	again := s.fork(t, asleep, engine.ForkOptions{KeepIdentity: true})
	check(again, "what woke up", "awake")
	wantDisk(t, again, "what woke up")
	s.fillDisk(t, again, "what woke up")
	check(children[0], "the live fork", "a")

	if most, err := s.Engine.MaxDisk(); err != nil || most < diskSize {
		t.Errorf("the host holds disks of %d bytes at most (%v)", most, err)
	}
	for _, spec.Disk = range []uint64{engine.MinDisk - 1, engine.LargestDisk + 1} {
		if sb, err := s.Engine.Boot(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "not possible") {
			t.Errorf("a disk of %d bytes: %v", spec.Disk, err)
			if err == nil {
				_ = sb.Close()
			}
		}
	}
}

// wantDisk checks the size of a disk.
func wantDisk(t *testing.T, sb engine.Sandbox, who string) {
	t.Helper()
	// A file system needs some of the disk for itself.
	const least = diskSize / 100 * 95
	if size := number(t, sh(t, sb, "df -k / | awk 'END { print $2 }'")) << 10; size < least || size > diskSize+4096 {
		t.Errorf("the disk of %s has %d bytes, not %d", who, size, diskSize)
	}
}

// fillDisk writes to a disk until it is full.
func (s *suite) fillDisk(t *testing.T, sb engine.Sandbox, who string) {
	t.Helper()
	free := number(t, sh(t, sb, "df -k / | awk 'END { print $4 }'")) << 10
	got := sh(t, sb, "dd if=/dev/zero of=/fill bs=65536 2>&1; ls -l /fill | awk '{ print $5 }'; rm /fill; echo room > /after; cat /after; rm /after")
	lines := strings.Split(got, "\n")
	if !strings.Contains(got, "No space left on device") || lines[len(lines)-1] != "room" {
		t.Errorf("%s did not fill up, or stayed full: %q", who, got)
	}
	s.wantUse(t, sb, who, 0, diskSize/2) // space of deleted files is given back
	if filled := number(t, lines[len(lines)-2]); filled > free || filled < free-free/10 {
		t.Errorf("%s took %d bytes, of which %d were free", who, filled, free)
	}
}

// wantUse checks how much of the host's disk the sandbox's disk takes.
func (s *suite) wantUse(t *testing.T, sb engine.Sandbox, who string, least, most uint64) {
	t.Helper()
	if !s.caps.Disks {
		least, most = 0, 0 // the disk is in memory
	}
	if st, err := sb.Stats(t.Context()); err != nil || st.Disk < least || st.Disk > most {
		t.Errorf("the disk of %s takes %d bytes, not %d to %d (%v)", who, st.Disk, least, most, err)
	}
}
