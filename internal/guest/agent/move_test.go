package agent

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMove(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	a, b := writeTestFile(t, dir+"/a", "a", 0o600), writeTestFile(t, dir+"/b", "b", 0o600)
	wantKind(t, f.Move(a, b, false), ErrExists)
	wantKind(t, f.Move(dir+"/none", b, true), ErrNotFound)
	wantKind(t, f.Move(a, dir+"/no/where", true), ErrNotFound)
	wantKind(t, f.Move(a, dir+"/..", true), ErrInvalid)
	wantKind(t, f.Move("/", dir+"/root", true), ErrInvalid)
	if err := errors.Join(f.Move(a, dir+"/c", false), f.Move(dir+"/c", b, true), expectFile(b, "a")); err != nil {
		t.Error(err)
	}
	os.MkdirAll(dir+"/d/sub", 0o755)
	wantKind(t, f.Move(dir+"/d", dir+"/d/sub/x", false), ErrInvalid)
	os.MkdirAll(dir+"/full/x", 0o755)
	wantKind(t, f.Move(dir+"/d", dir+"/full", true), ErrNotEmpty)
}

// TestMoveAcrossFilesystems moves a tree to a tmpfs and back, in a mount
// namespace of its own.
func TestMoveAcrossFilesystems(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	os.Mkdir(dir+"/mnt", 0o755)
	src := dir + "/tree"
	os.MkdirAll(src+"/sub/empty", 0o755)
	writeTestFile(t, src+"/sub/file", strings.Repeat("data", 1<<19), 0o640)
	writeTestFile(t, src+"/exe", "x", 0o755)
	os.Chown(src+"/exe", 1234, 50)
	os.Chmod(src+"/exe", 0o755|os.ModeSetuid)
	os.Symlink("nowhere", src+"/link")
	unix.Mkfifo(src+"/fifo", 0o620)
	os.Chmod(src+"/sub/empty", 0o711)
	before := describe(t, src)
	onOwnThread(t, func() error {
		if err := unix.Mount("t", dir+"/mnt", "tmpfs", 0, ""); err != nil {
			return err
		}
		os.WriteFile(dir+"/mnt/taken", []byte("x"), 0o600)
		if err := f.Move(src, dir+"/mnt/taken", false); !errors.Is(err, ErrExists) {
			return errors.Join(errors.New("overwrote"), err)
		}
		if err := f.Move(dir+"/mnt", dir+"/elsewhere", false); !errors.Is(err, ErrBusy) {
			return errors.Join(errors.New("moved a mount"), err)
		}
		if err := f.Move(dir, dir+"/mnt/inside", false); !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrBusy) {
			return errors.Join(errors.New("moved a folder into itself"), err)
		}
		if err := f.Move(src, dir+"/mnt/tree", false); err != nil {
			return err
		}
		if got := describe(t, dir+"/mnt/tree"); got != before {
			return errors.New("became\n" + got + "instead of\n" + before)
		}
		if _, err := os.Lstat(src); err == nil {
			return errors.New("the source is still there")
		}
		if left, _ := filepath.Glob(dir + "/mnt/.agentrun*"); len(left) > 0 {
			return errors.New("left behind " + left[0])
		}
		if err := f.Move(dir+"/mnt/tree", src, true); err != nil {
			return err
		}
		if got := describe(t, src); got != before {
			return errors.New("came back as\n" + got)
		}
		return nil
	})
}

func describe(t *testing.T, dir string) string {
	t.Helper()
	cmd := exec.Command("sh", "-c", `cd "$0" && find . -printf '%p %y %m %U %G %T@ %l\n' | sort; cd "$0" && find . -type f | sort | xargs cksum`, dir)
	// The command runs in the caller's namespace and root only if forked there;
	// os/exec forks on the calling thread.
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
	return string(out)
}

func TestRemove(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	keep := writeTestFile(t, dir+"/keep", "x", 0o600)
	os.MkdirAll(dir+"/tree/a/b", 0o755)
	os.Symlink(dir, dir+"/tree/a/up")
	os.Symlink(keep, dir+"/tree/link")
	for i := range 300 {
		os.MkdirAll(dir+"/tree/many/"+strings.Repeat("d", i%50+1), 0o755)
		writeTestFile(t, dir+"/tree/many/"+strings.Repeat("f", i%200+1), "", 0o600)
	}
	wantKind(t, f.Remove(dir+"/tree", false), ErrNotEmpty)
	if err := f.Remove(dir+"/tree/link", true); err != nil {
		t.Error(err)
	}
	if err := f.Remove(dir+"/tree/", true); err != nil {
		t.Error(err)
	}
	if err := errors.Join(expectFile(keep, "x"), os.Mkdir(dir+"/e", 0o700), f.Remove(dir+"/e", false), f.Remove(keep, false)); err != nil {
		t.Error(err)
	}
	wantKind(t, f.Remove(dir+"/none", true), ErrNotFound)
	for _, bad := range []string{"/", "//", dir + "/..", dir + "/."} {
		wantKind(t, f.Remove(bad, true), ErrInvalid)
	}
	wantKind(t, f.Remove("/proc", true), ErrBusy)

	// The tree is deeper than the number of descriptors, and than a path can express.
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 3000 {
		unix.Mkdirat(fd, "deep", 0o755)
		next, err := unix.Openat(fd, "deep", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		fd = next
	}
	unix.Close(fd)
	if err := f.Remove(dir+"/deep", true); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestRemoveStopsAtMounts(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	os.MkdirAll(dir+"/tree/sub/mnt", 0o755)
	onOwnThread(t, func() error {
		if err := unix.Mount("t", dir+"/tree/sub/mnt", "tmpfs", 0, ""); err != nil {
			return err
		}
		os.WriteFile(dir+"/tree/sub/mnt/precious", nil, 0o600)
		for _, path := range []string{"/tree", "/tree/sub", "/tree/sub/mnt"} {
			if err := f.Remove(dir+path, true); !errors.Is(err, ErrBusy) {
				return errors.Join(errors.New(path), err)
			}
		}
		_, err := os.Stat(dir + "/tree/sub/mnt/precious")
		return err
	})
}

// TestMoveAsUserAcrossFilesystems uses /dev/shm, which is another filesystem than
// /tmp on any Linux machine.
func TestMoveAsUserAcrossFilesystems(t *testing.T) {
	alice := filesAs(t, "alice")
	dir := openDir(t)
	shm, err := os.MkdirTemp("/dev/shm", "guest")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(shm)
	os.Chmod(shm, 0o777)
	suid := writeTestFile(t, dir+"/suid", "x", 0o755)
	os.Chmod(suid, 0o755|os.ModeSetuid)
	if err := alice.Move(suid, shm+"/suid", false); err != nil {
		t.Fatal(err)
	}
	if i, err := alice.Stat(shm + "/suid"); err != nil || i.UID != 1234 || i.Mode != 0o755 {
		t.Errorf("%+v %v", i, err)
	}
	secret := writeTestFile(t, dir+"/secret", "x", 0o600)
	wantKind(t, alice.Move(secret, shm+"/secret", false), ErrPermission)
	if left, _ := os.ReadDir(shm); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}
