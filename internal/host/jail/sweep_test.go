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

// TestSweepWaits: a process that ends lets go of its user id before it leaves its
// group. Whoever comes in between waits for it, and leaves nothing behind.
func TestSweepWaits(t *testing.T) {
	cfg := config(t)
	a, b := open(t, cfg), open(t, cfg)
	if err := b.Sweep(); err != nil { // which a jail does by itself when it is first used
		t.Fatal(err)
	}
	for range 20 {
		p := start(t, a, roomy)
		if err := errors.Join(p.Cell.lock.Close(), p.Kill()); err != nil {
			t.Fatal(err)
		}
		for locked(t, b, p.Cell.UID()) > 0 {
			runtime.Gosched() // there is no event for it
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

// TestFolderVanishes: who deletes the folder of user ids is told so.
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

// TestUIDOfTheLiving: a process that lets go of the lock of its user id, when its
// parent has died, still has the id: nobody frees it, nor gets it, until the
// process has ended. With cgroups and without.
func TestUIDOfTheLiving(t *testing.T) {
	for name, cgroups := range map[string]bool{"cgroups": true, "no cgroups": false} {
		t.Run(name, func(t *testing.T) {
			cfg := config(t)
			// Nobody else on this machine has it.
			cfg.FirstUID, cfg.UIDs = defaultFirstUID+defaultUIDs+os.Getpid(), 1
			if !cgroups {
				cfg.Cgroup, cfg.AllowUnlimited = "no\nname", true // the kernel refuses a line break
			}
			a, b := open(t, cfg), open(t, cfg)
			p := start(t, a, roomy)
			defer func() { _ = p.Kill() }() // it has ended, unless the test ended before
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

// locked counts who holds the lock of a user id, as /proc/locks tells without
// touching it.
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
