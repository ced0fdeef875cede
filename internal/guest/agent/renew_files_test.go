package agent

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// TestRenewHostNameForReal renews twice in a namespace of its own, as a fork of a
// fork does. The name between leaves no trace.
func TestRenewHostNameForReal(t *testing.T) {
	r, k := newTestRenewer(t)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	twice := func() error {
		for i, name := range []string{"between", "fork-1"} {
			req := renewal(uint64(i + 1))
			req.Hostname = name
			if _, err := r.Renew(t.Context(), req); err != nil {
				return err
			}
			if now, err := os.Hostname(); os.Geteuid() == 0 && now != name {
				return errors.Join(errors.New("the host name is "+now), err)
			}
		}
		return nil
	}
	hosts := newHosts
	if os.Geteuid() == 0 {
		r.ioctl, r.setHostname = rawIoctl, SetHostname
		onOwnThread(t, twice)
	} else {
		// The kernel's name does not change, so the line with the name between is not
		// recognised.
		hosts = strings.Replace(hosts, "fork-1", "between", 1) + "127.0.1.1\tfork-1\n"
		if err := twice(); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(expectFile(r.root+"/etc/hostname", "fork-1\n"), expectFile(r.root+"/etc/hosts", hosts)); err != nil {
		t.Error(err)
	}
	if now, err := os.Hostname(); now != host {
		t.Errorf("the host is now %s, %v", now, err)
	}
	if !strings.Contains(k.log(), "set clock, ") {
		t.Errorf("calls: %s", k.log())
	}
}

func TestRenewHosts(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ before, after string }{
		"empty":            {"", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tfork-1\n"},
		"line of boot":     {"127.0.0.1 localhost\n127.0.1.1\t" + host + "\n", "127.0.0.1 localhost\n127.0.1.1\tfork-1\n"},
		"line comes first": {"127.0.1.1\t" + host + "\n::1 localhost\n", "127.0.1.1\tfork-1\n::1 localhost\n"},
		"image's own line": {"127.0.0.1 localhost " + host, "127.0.0.1 localhost " + host + "\n127.0.1.1\tfork-1\n"},
		"longer name":      {"::1 localhost\n127.0.1.1\t" + host + "x\n", "::1 localhost\n127.0.1.1\t" + host + "x\n127.0.1.1\tfork-1\n"},
		"named already":    {"1.2.3.4 fork-1 localhost # mine", "1.2.3.4 fork-1 localhost # mine"},
		"too large":        {strings.Repeat("#", maxAccountFile+1), strings.Repeat("#", maxAccountFile+1)},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := newTestRenewer(t)
			writeTestFile(t, r.root+"/etc/hosts", c.before, 0o640)
			var before, after unix.Stat_t
			unix.Stat(r.root+"/etc/hosts", &before)
			if _, err := r.Renew(t.Context(), renewal(1)); err != nil {
				t.Fatal(err)
			}
			if err := expectFile(r.root+"/etc/hosts", c.after); err != nil {
				t.Error(err)
			}
			unix.Stat(r.root+"/etc/hosts", &after)
			if after.Mode != before.Mode || (c.before == c.after) != (after.Ino == before.Ino) {
				t.Errorf("%+v became %+v", before, after)
			}
		})
	}
}

// TestRenewFollowsNoLinks has links in all places, as an image may have.
func TestRenewFollowsNoLinks(t *testing.T) {
	r, _ := newTestRenewer(t)
	outside := t.TempDir()
	for _, name := range []string{"hostname", "hosts", "machine-id"} {
		writeTestFile(t, outside+"/"+name, "outside\n", 0o644)
		os.Remove(r.root + "/etc/" + name)
		if err := os.Symlink(outside+"/"+name, r.root+"/etc/"+name); err != nil {
			t.Fatal(err)
		}
	}
	os.Remove(r.root + "/run/agentrun/generation")
	writeTestFile(t, outside+"/generation", "outside\n", 0o644)
	os.Symlink(outside+"/generation", r.root+"/run/agentrun/generation")
	if _, err := r.Renew(t.Context(), renewal(1)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"hostname", "hosts", "machine-id", "generation"} {
		if err := expectFile(outside+"/"+name, "outside\n"); err != nil {
			t.Error(err)
		}
	}
	for path, want := range map[string]os.FileMode{
		"/etc/hostname": os.ModeSymlink, "/etc/hosts": os.ModeSymlink, "/etc/machine-id": 0, "/run/agentrun/generation": 0,
	} {
		if st, err := os.Lstat(r.root + path); err != nil || st.Mode().Type() != want {
			t.Errorf("%s is %v, %v", path, st.Mode(), err)
		}
	}

	// Folders that are links are not followed.
	for i, dir := range []string{"/etc", "/run/agentrun"} {
		os.RemoveAll(r.root + dir)
		if err := os.Symlink(outside, r.root+dir); err != nil {
			t.Fatal(err)
		}
		_, err := r.Renew(t.Context(), renewal(2))
		wantKind(t, err, ErrNotDirectory)
		if !strings.Contains(err.Error(), dir) || r.Generation() != 1 {
			t.Errorf("%d: %v", i, err)
		}
		os.Remove(r.root + dir)
	}
	for _, name := range []string{"hostname", "hosts", "machine-id", "generation"} {
		if err := expectFile(outside+"/"+name, "outside\n"); err != nil {
			t.Error(err)
		}
	}
}

func TestRenewFileModes(t *testing.T) {
	r, _ := newTestRenewer(t)
	os.RemoveAll(r.root + "/run/agentrun")
	os.Remove(r.root + "/etc/machine-id")
	os.Chmod(r.root+"/etc/hostname", 0o640)
	uid := os.Getuid()
	if uid == 0 {
		uid = 1234
		if err := os.Chown(r.root+"/etc/hostname", uid, 1234); err != nil {
			t.Fatal(err)
		}
	}
	// A program that has the old file open still reads the old content.
	old, err := os.Open(r.root + "/etc/hostname")
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if _, err := r.Renew(t.Context(), renewal(1)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]uint32{
		"/etc/hostname": unix.S_IFREG | 0o640, "/etc/machine-id": unix.S_IFREG | 0o444,
		"/run/agentrun": unix.S_IFDIR | 0o755, "/run/agentrun/generation": unix.S_IFREG | 0o444,
	} {
		var st unix.Stat_t
		if err := unix.Lstat(r.root+path, &st); err != nil || st.Mode != want {
			t.Errorf("%s has mode %o, want %o, %v", path, st.Mode, want, err)
		}
		if path == "/etc/hostname" && int(st.Uid) != uid {
			t.Errorf("%s belongs to %d", path, st.Uid)
		}
	}
	buf := make([]byte, 16)
	if n, _ := old.Read(buf); string(buf[:n]) != "parent\n" {
		t.Errorf("the old file was written to: %q", buf[:n])
	}
}

func TestRenewWithoutFiles(t *testing.T) {
	r, k := newTestRenewer(t)
	for _, name := range []string{"hostname", "hosts", "machine-id"} {
		os.Remove(r.root + "/etc/" + name)
	}
	if _, err := r.Renew(t.Context(), renewal(1)); err != nil {
		t.Fatal(err)
	}
	if err := expectFile(r.root+"/etc/machine-id", forkID+"\n"); err != nil {
		t.Error(err)
	}
	if made, _ := filepath.Glob(r.root + "/etc/host*"); len(made) > 0 {
		t.Errorf("made %v", made)
	}
	os.RemoveAll(r.root + "/etc")
	if _, err := r.Renew(t.Context(), renewal(2)); err != nil || r.Generation() != 2 {
		t.Errorf("without /etc: %v", err)
	}
	if _, err := os.Lstat(r.root + "/etc"); err == nil {
		t.Error("made /etc")
	}
	os.RemoveAll(r.root + "/run")
	_, err := r.Renew(t.Context(), renewal(3))
	wantKind(t, err, ErrNotFound)
	if !strings.Contains(err.Error(), "/run/agentrun") || r.Generation() != 2 || strings.Count(k.log(), "reseed") != 3 {
		t.Errorf("without /run: %v", err)
	}
}

// TestRenewNeedsAWritableRoot uses roots that cannot be written to: read-only and
// full ones if the test may mount, otherwise one without the permission.
func TestRenewNeedsAWritableRoot(t *testing.T) {
	for _, c := range []struct {
		file  string // the file that cannot be replaced
		files []string
	}{
		{"hostname", []string{"hostname", "hosts", "machine-id"}},
		{"hosts", []string{"hosts"}},
		{"machine-id", nil},
	} {
		for _, how := range []struct {
			name string
			kind Kind
			next string
		}{{"read-only", ErrReadOnly, "agentrun.overlay=tmpfs"}, {"full", ErrNoSpace, "make room"}} {
			t.Run(how.name+" "+c.file, func(t *testing.T) {
				r, _ := newTestRenewer(t)
				etc := r.root + "/etc"
				check := func() error {
					_, err := r.Renew(t.Context(), renewal(1))
					if !errors.Is(err, how.kind) || !strings.Contains(err.Error(), "replace /etc/"+c.file) || !strings.Contains(err.Error(), how.next) {
						return errors.Join(errors.New("not refused, or with other words"), err)
					}
					if left, _ := filepath.Glob(etc + "/.agentrun*"); len(left) > 0 || r.Generation() != 0 {
						return errors.New("left behind: " + strings.Join(left, " "))
					}
					return expectFile(r.root+"/run/agentrun/generation", "0\n")
				}
				fill := func() error {
					for _, name := range c.files {
						if err := os.WriteFile(etc+"/"+name, []byte("old\n"), 0o644); err != nil {
							return err
						}
					}
					return nil
				}
				if os.Geteuid() != 0 {
					how.kind, how.next = ErrPermission, ""
					os.RemoveAll(etc)
					if err := errors.Join(os.Mkdir(etc, 0o755), fill(), os.Chmod(etc, 0o555), check(), os.Chmod(etc, 0o755)); err != nil {
						t.Error(err)
					}
					return
				}
				onOwnThread(t, func() error {
					err := errors.Join(unix.Mount("etc", etc, "tmpfs", 0, "size=64k"), fill())
					if err == nil && how.kind == ErrReadOnly {
						err = unix.Mount("", etc, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
					} else if err == nil {
						if err = os.WriteFile(etc+"/ballast", bytes.Repeat([]byte{1}, 128<<10), 0o644); errors.Is(err, syscall.ENOSPC) {
							err = nil
						}
					}
					return errors.Join(err, check())
				})
			})
		}
	}
}

func TestServerRenew(t *testing.T) {
	r, k := newTestRenewer(t)
	c, _ := dialServer(t, serve(t, &Server{Renewer: r}))
	ctx := rpcContext(t)
	if info, err := c.Info(ctx); err != nil || info.Generation != 0 {
		t.Errorf("%+v, %v", info, err)
	}
	reply, err := c.Renew(ctx, *renewal(3))
	if err != nil || reply.Generation != 3 || reply.ClockStep == 0 {
		t.Fatalf("%+v, %v", reply, err)
	}
	if info, err := c.Info(ctx); err != nil || info.Generation != 3 {
		t.Errorf("%+v, %v", info, err)
	}
	short := renewal(4)
	short.Entropy = short.Entropy[:31]
	for name, req := range map[string]*guestrpc.RenewRequest{"same generation": renewal(3), "short entropy": short} {
		if _, err := c.Renew(ctx, *req); code(err) != guestrpc.CodeInvalidArgument || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
	k.mu.Lock()
	k.fail["add entropy"] = syscall.EPERM
	k.mu.Unlock()
	if _, err := c.Renew(ctx, *renewal(4)); code(err) != guestrpc.CodePermissionDenied || strings.Contains(err.Error(), "secret") {
		t.Errorf("no entropy: %v", err)
	}
	if info, err := c.Info(ctx); err != nil || info.Generation != 3 {
		t.Errorf("after failures: %+v, %v", info, err)
	}
}

// TestServerRenewOutsideOfAVM: outside of a VM a renewal is refused, and does not
// touch the machine.
func TestServerRenewOutsideOfAVM(t *testing.T) {
	if _, err := startClient(t).Renew(rpcContext(t), *renewal(1)); code(err) != guestrpc.CodeFailedPrecondition {
		t.Error(err)
	}
	req := renewal(1)
	if _, err := (&Server{}).Renew(t.Context(), req); err == nil {
		t.Error("renewed")
	}
	expectWiped(t, req)
}

// TestServerWorksDuringRenew: a renewal that does not finish blocks only its own
// session.
func TestServerWorksDuringRenew(t *testing.T) {
	r, k := newTestRenewer(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	r.setHostname = func(name string) error {
		entered <- struct{}{}
		<-leave
		return k.setHostname(name)
	}
	path := serve(t, &Server{Renewer: r})
	c, _ := dialServer(t, path)
	ctx := rpcContext(t)
	renewed := make(chan error, 2)
	for _, generation := range []uint64{1, 2} {
		if generation == 2 {
			await(t, entered, "the first renewal")
		}
		caller, _ := dialServer(t, path)
		go func() {
			_, err := caller.Renew(ctx, *renewal(generation))
			renewed <- err
		}()
	}
	if info, err := c.Info(ctx); err != nil || info.Generation != 0 {
		t.Errorf("%+v, %v", info, err)
	}
	if _, err := c.WriteFile(ctx, guestrpc.WriteRequest{Path: r.root + "/etc/new", Atomic: true}, strings.NewReader("works")); err != nil {
		t.Error(err)
	}
	other, _ := dialServer(t, path)
	if _, err := other.Stat(ctx, guestrpc.StatRequest{Path: r.root}); err != nil {
		t.Error(err)
	}
	select {
	case err := <-renewed:
		t.Errorf("a renewal has ended: %v", err)
	default:
	}
	leave <- struct{}{}
	await(t, entered, "the second renewal")
	leave <- struct{}{}
	for range 2 {
		if err := <-renewed; err != nil {
			t.Error(err)
		}
	}
	if info, err := c.Info(ctx); err != nil || info.Generation != 2 {
		t.Errorf("%+v, %v", info, err)
	}
}

// TestGenerationCanBeWatched: programs with generators that a renewal does not reach
// see the file change. By then everything else is renewed.
func TestGenerationCanBeWatched(t *testing.T) {
	r, _ := newTestRenewer(t)
	c, _ := dialServer(t, serve(t, &Server{Renewer: r}))
	ctx := rpcContext(t)
	folder := r.root + "/run/agentrun"
	file := folder + "/generation"
	watch := func(path string) *guestrpc.Watcher {
		w, err := c.Watch(ctx, guestrpc.WatchRequest{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		return w
	}
	await := func(w *guestrpc.Watcher, kind guestrpc.EventKind) {
		t.Helper()
		for {
			e, err := w.Next()
			if err != nil {
				t.Fatalf("waiting for event %d: %v", kind, err)
			}
			if e.Kind == kind && e.Path == file {
				return
			}
		}
	}
	ofFolder := watch(folder)
	for _, generation := range []string{"1", "2"} {
		ofFile := watch(file)
		n := uint64(generation[0] - '0')
		renewed := make(chan error, 1)
		go func() {
			_, err := c.Renew(ctx, *renewal(n))
			renewed <- err
		}()
		await(ofFolder, guestrpc.EventMovedTo)
		if err := errors.Join(expectFile(file, generation+"\n"), expectFile(r.root+"/etc/machine-id", forkID+"\n")); err != nil {
			t.Error(err)
		}
		await(ofFile, guestrpc.EventChmod)
		await(ofFile, guestrpc.EventGone)
		if err := <-renewed; err != nil {
			t.Error(err)
		}
	}
}
