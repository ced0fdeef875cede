package agent

import (
	"errors"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// prepared is the Renewer of a root as boot leaves it, prepared for forks.
func prepared(t *testing.T) (*Renewer, *fakeInterpreter) {
	t.Helper()
	r, k := newTestRenewer(t)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	writeTestFile(t, r.root+"/etc/hostname", host+"\n", 0o644)
	writeTestFile(t, r.root+"/etc/machine-id", strings.Repeat("ab", 16)+"\n", machineIDMode)
	if err := r.Prepare(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for i := range r.kept {
			if r.kept[i].open {
				unix.Close(r.kept[i].fd)
			}
		}
	})
	return r, k
}

func statOf(t *testing.T, path string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st
}

// TestPrepareChangesNothing: Prepare has no visible effect, but takes the same path
// as a renewal.
func TestPrepareChangesNothing(t *testing.T) {
	r, k := newTestRenewer(t)
	files := map[string]string{}
	for _, path := range keptPaths {
		b, err := os.ReadFile(r.root + path)
		if err != nil {
			t.Fatal(err)
		}
		files[path] = string(b)
	}
	for range 3 {
		if err := r.Prepare(t.Context(), true); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range files {
		if err := expectFile(r.root+path, want); err != nil {
			t.Error(err)
		}
	}
	if r.Generation() != 0 || strings.Contains(k.log(), "set clock") || !strings.HasPrefix(k.log(), "add entropy, reseed") {
		t.Errorf("generation %d, calls %s", r.Generation(), k.log())
	}
	expectNoLeftovers(t, r.root)
}

// TestRenewInPlace: after Prepare no file is made, and forks of forks find the right
// contents, whatever their lengths.
func TestRenewInPlace(t *testing.T) {
	r, _ := prepared(t)
	before := map[string]unix.Stat_t{}
	for _, path := range keptPaths {
		before[path] = statOf(t, r.root+path)
	}
	for i, name := range []string{"a-name-that-is-quite-long", "b", "fork-1"} {
		req := renewal(uint64(i + 9)) // the number gets longer as well
		req.Hostname = name
		old := "127.0.1.1\t" + name
		if _, err := r.Renew(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		hosts, err := os.ReadFile(r.root + "/etc/hosts")
		if err != nil || !strings.Contains(string(hosts), old+"\n") {
			t.Errorf("hosts %q, %v", hosts, err)
		}
		if err := errors.Join(expectFile(r.root+"/etc/hostname", name+"\n"), expectFile(r.root+"/etc/machine-id", forkID+"\n")); err != nil {
			t.Error(err)
		}
	}
	if err := expectFile(r.root+"/run/agentrun/generation", "11\n"); err != nil {
		t.Error(err)
	}
	for _, path := range keptPaths {
		if now := statOf(t, r.root+path); now.Ino != before[path].Ino || now.Mode != before[path].Mode {
			t.Errorf("%s was replaced", path)
		}
	}
}

// TestRenewReplacesWhatChanged: a file is replaced and not written to if it is not
// the opened one, or if it has another name.
func TestRenewReplacesWhatChanged(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, path string){
		"replaced": func(t *testing.T, path string) {
			writeTestFile(t, path+".new", "theirs\n", 0o444)
			if err := os.Rename(path+".new", path); err != nil {
				t.Fatal(err)
			}
		},
		"linked": func(t *testing.T, path string) {
			if err := os.Link(path, path+".link"); err != nil {
				t.Fatal(err)
			}
		},
		"removed": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
		"a link": func(t *testing.T, path string) {
			writeTestFile(t, path+".target", "theirs\n", 0o444)
			if err := errors.Join(os.Remove(path), os.Symlink(path+".target", path)); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := prepared(t)
			path := r.root + "/etc/machine-id"
			kept := r.kept[keptMachineID].fd
			change(t, path)
			if _, err := r.Renew(t.Context(), renewal(1)); err != nil {
				t.Fatal(err)
			}
			if err := expectFile(path, forkID+"\n"); err != nil {
				t.Error(err)
			}
			old := make([]byte, 64)
			n, err := unix.Pread(kept, old, 0)
			if err != nil || strings.HasPrefix(string(old[:n]), forkID) {
				t.Errorf("the file that was opened has %q, %v", old[:n], err)
			}
			if b, err := os.ReadFile(path + ".target"); err == nil && string(b) != "theirs\n" {
				t.Errorf("the link was followed: %q", b)
			}
			// The next preparation takes the new file.
			if err := r.Prepare(t.Context(), false); err != nil {
				t.Fatal(err)
			}
			ino := statOf(t, path).Ino
			if _, err := r.Renew(t.Context(), renewal(2)); err != nil {
				t.Fatal(err)
			}
			if statOf(t, path).Ino != ino {
				t.Error("replaced again")
			}
		})
	}
}

// TestRenewLooksAgain: a file that was moved away is not written to, except for a
// moment after the last check of the paths.
func TestRenewLooksAgain(t *testing.T) {
	r, _ := prepared(t)
	path := r.root + "/etc/machine-id"
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	r.looked = r.looked.Add(-freshness)
	if _, err := r.Renew(t.Context(), renewal(1)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(expectFile(path, forkID+"\n"), expectFile(path+".old", strings.Repeat("ab", 16)+"\n")); err != nil {
		t.Error(err)
	}
}

// TestRenewAllocatesNothing: a renewal allocates nothing, since memory that is
// allocated in a fork is the fork's own.
func TestRenewAllocatesNothing(t *testing.T) {
	r, k := prepared(t)
	r.ioctl = func(int, uint, unsafe.Pointer) error { return nil }
	r.setClock = func(int32, *unix.Timespec) error { return nil }
	r.setHostname = func(string) error { return nil }
	k.calls = nil
	ctx, req := t.Context(), renewal(1)
	if n := testing.AllocsPerRun(100, func() {
		req.Generation++
		if _, err := r.Renew(ctx, req); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("a renewal allocates %v times", n)
	}
}

// TestServerPrepare: the host can call Prepare. Outside of a VM it is refused.
func TestServerPrepare(t *testing.T) {
	r, k := newTestRenewer(t)
	c, _ := dialServer(t, serve(t, &Server{Renewer: r}))
	if _, err := c.Renew(rpcContext(t), *renewal(1)); err != nil {
		t.Fatal(err)
	}
	s := &Server{}
	if err := s.Prepare(t.Context(), &guestrpc.PrepareRequest{}); err == nil {
		t.Error("prepared without a machine")
	}
	s.Renewer = r
	if err := s.Prepare(t.Context(), &guestrpc.PrepareRequest{}); err != nil {
		t.Error(err)
	}
	if !strings.HasSuffix(k.log(), "add entropy, reseed") || r.Generation() != 1 {
		t.Errorf("calls %s, generation %d", k.log(), r.Generation())
	}
}
