package jail

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSweepWaits: an ending process unlocks its user id before it leaves its
// group. A sweep in between waits for the process, and removes the group.
func TestSweepWaits(t *testing.T) {
	cfg := config(t)
	a, b := open(t, cfg), open(t, cfg)
	if err := b.Sweep(); err != nil { // a jail also does this by itself when it is first used
		t.Fatal(err)
	}
	for range 20 {
		p := start(t, a, roomy)
		if err := errors.Join(p.Cell.lock.Close(), p.Kill()); err != nil {
			t.Fatal(err)
		}
		for locked(t, b, p.Cell.UID()) > 0 {
			runtime.Gosched() // the kernel has no event for the unlock
		}
		if err := b.Sweep(); err != nil {
			t.Error(err)
		}
		if left := names(t, cfg.Folder); len(left) > 0 {
			t.Errorf("user ids %q are left", left)
		}
		if _, err := p.Wait(); err != nil {
			t.Error(err)
		}
	}
}

// TestFolderVanishes: without the folder of user ids the error says that it
// does not exist.
func TestFolderVanishes(t *testing.T) {
	cfg := config(t)
	j := open(t, cfg)
	if err := errors.Join(j.Check(), os.Remove(cfg.Folder)); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Start(roomy, os.Stdin, os.Stderr); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the folder: %v", err)
	}
}

// TestUIDOfTheLiving: a process whose parent has died closes the file that locks
// its user id. The process still owns the id: until it has ended the id is
// neither freed nor given to another process. With cgroups and without.
func TestUIDOfTheLiving(t *testing.T) {
	for name, cgroups := range map[string]bool{"cgroups": true, "no cgroups": false} {
		t.Run(name, func(t *testing.T) {
			cfg := config(t)
			// No other test on this host uses this id.
			cfg.FirstUID, cfg.UIDs = defaultFirstUID+defaultUIDs+os.Getpid(), 1
			if !cgroups {
				cfg.Cgroup, cfg.AllowUnlimited = "no\nname", true // the kernel refuses a line break
			}
			a, b := open(t, cfg), open(t, cfg)
			p := start(t, a, roomy)
			defer func() { _ = p.Kill() }() // it has ended, unless the test failed before
			p.order(t, "let go of its user id and hold", 0, 0)
			if said := p.answer(t); said != `"let go"` {
				t.Fatalf("%q, stderr %q", said, p.said(t))
			}
			if err := p.Cell.lock.Close(); err != nil { // as if the parent had died
				t.Fatal(err)
			}
			if n := locked(t, b, p.Cell.UID()); n != 0 {
				t.Fatalf("%d hold the lock", n)
			}
			if err := b.Sweep(); err != nil {
				t.Error(err)
			}
			if left := names(t, cfg.Folder); len(left) != 1 {
				t.Errorf("the user ids that are taken: %q", left)
			}
			if other, err := b.Start(roomy, os.Stdin, os.Stderr); err == nil || !strings.Contains(err.Error(), "all 1 user ids") {
				t.Errorf("another process got the id: %v", err)
				if err == nil {
					_ = other.Kill()
				}
			}
			if err := p.Kill(); err != nil {
				t.Fatal(err)
			}
			if _, err := p.Wait(); err != nil {
				t.Fatal(err)
			}
			if err := b.Sweep(); err != nil {
				t.Error(err)
			}
			if left := names(t, cfg.Folder); len(left) != 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

// locked counts the holders of the lock of a user id from /proc/locks, without
// touching the lock.
func locked(t *testing.T, j *Jail, uid int) (holders int) {
	t.Helper()
	all, err := j.cells()
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(all.uids.path(uid), &st); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), ":"+strconv.FormatUint(st.Ino, 10)+" ")
}
