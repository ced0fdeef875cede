package agent

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func filesAs(t *testing.T, user string) *Files {
	t.Helper()
	f, err := NewFiles(testAccounts(t), user)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func readBack(t *testing.T, f *Files, path string, offset, length int64) (string, error) {
	t.Helper()
	r, err := f.OpenRead(path, offset, length)
	if err != nil {
		return "", err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return string(b), err
}

func put(f *Files, path, data string, opts WriteOptions) error {
	w, err := f.OpenWrite(path, opts)
	if err != nil {
		return err
	}
	if _, err := w.Write([]byte(data)); err != nil {
		w.Abort()
		return err
	}
	return w.Commit()
}

func TestStat(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	file := writeTestFile(t, dir+"/file", "hello", 0o640)
	os.Chown(file, 1234, 50)
	when := time.Unix(1_000_000, 500)
	os.Chtimes(file, when, when)
	os.Chmod(file, 0o4640|os.ModeSetuid)
	os.Symlink("file", dir+"/link")
	unix.Mkfifo(dir+"/fifo", 0o600)
	got, err := f.Stat(file)
	want := Info{Path: file, Name: "file", Type: TypeFile, Mode: 0o4640, Size: 5, UID: 1234, GID: 50, Owner: "alice", Group: "staff", ModTime: when}
	if err != nil || got != want {
		t.Errorf("got %+v\nwant %+v, %v", got, want, err)
	}
	if i, err := f.Stat(dir + "/link/"); err != nil || i.Type != TypeFile || i.Path != dir+"/link" {
		t.Errorf("through the link: %+v %v", i, err)
	}
	if i, err := f.Lstat(dir + "/link"); err != nil || i.Type != TypeSymlink || i.Target != "file" {
		t.Errorf("the link: %+v %v", i, err)
	}
	for path, want := range map[string]FileType{dir: TypeDirectory, dir + "/fifo": TypeFIFO, "/dev/null": TypeCharDevice, "/": TypeDirectory} {
		if i, err := f.Stat(path); err != nil || i.Type != want || i.Name == "" {
			t.Errorf("%s: %+v %v", path, i, err)
		}
	}
	for path, want := range map[string]Kind{"": ErrInvalid, "relative": ErrInvalid, "/a\x00b": ErrInvalid, "/" + strings.Repeat("x", 5000): ErrTooLarge,
		dir + "/nothing": ErrNotFound, file + "/x": ErrNotDirectory, dir + "/" + strings.Repeat("x", 300): ErrTooLarge} {
		_, err := f.Stat(path)
		wantKind(t, err, want)
	}
}

func TestRead(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	file := writeTestFile(t, dir+"/file", "0123456789", 0o600)
	for _, c := range []struct {
		off, n int64
		want   string
	}{{0, 0, "0123456789"}, {3, 0, "3456789"}, {3, 4, "3456"}, {8, 100, "89"}, {10, 0, ""}, {99, 5, ""}} {
		if got, err := readBack(t, f, file, c.off, c.n); err != nil || got != c.want {
			t.Errorf("%+v: %q %v", c, got, err)
		}
	}
	if got, err := readBack(t, f, "/proc/self/status", 0, 0); err != nil || !strings.Contains(got, "Name:") {
		t.Errorf("/proc: %q %v", got, err)
	}
	unix.Mkfifo(dir+"/fifo", 0o600)
	for path, want := range map[string]Kind{dir: ErrIsDirectory, dir + "/fifo": ErrNotRegular, "/dev/zero": ErrNotRegular, dir + "/no": ErrNotFound} {
		_, err := f.OpenRead(path, 0, 0)
		wantKind(t, err, want)
		err = put(f, path, "x", WriteOptions{NoCreate: true})
		wantKind(t, err, want)
		if want == ErrNotFound {
			want = "" // an ordinary write creates it
		}
		for _, atomic := range []bool{false, true} {
			if err = put(f, path, "x", WriteOptions{Atomic: atomic}); want != "" {
				wantKind(t, err, want)
			} else if err != nil {
				t.Error(err)
			}
		}
	}
	_, err := f.OpenRead(file, -1, 0)
	wantKind(t, err, ErrInvalid)
	r, err := f.OpenRead(file, 0, 0)
	if err != nil || r.Info().Size != 10 {
		t.Fatal(err)
	}
	r.Close()
	r.Close()
	if _, err := r.Read(make([]byte, 1)); err != ErrClosed {
		t.Errorf("closed: %v", err)
	}
}

func TestWrite(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	path := dir + "/a/b/file"
	wantKind(t, put(f, path, "x", WriteOptions{}), ErrNotFound)
	for i, c := range []struct {
		opts WriteOptions
		data string
		want string
		kind Kind
	}{
		{WriteOptions{Parents: true, Perm: 0o666}, "hello", "hello", ""},
		{WriteOptions{Mode: WriteAppend}, " world", "hello world", ""},
		{WriteOptions{Mode: WriteAt, Offset: 6}, "W", "hello World", ""},
		{WriteOptions{Mode: WriteAt, Offset: 12, Sync: true}, "!", "hello World\x00!", ""},
		{WriteOptions{Exclusive: true}, "x", "hello World\x00!", ErrExists},
		{WriteOptions{Exclusive: true, Atomic: true}, "x", "hello World\x00!", ErrExists},
		{WriteOptions{Atomic: true}, "atomic", "atomic", ""},
		{WriteOptions{}, "short", "short", ""},
		{WriteOptions{NoCreate: true}, "again", "again", ""},
		{WriteOptions{Mode: WriteAppend, Atomic: true}, "x", "again", ErrInvalid},
		{WriteOptions{Offset: 1}, "x", "again", ErrInvalid},
		{WriteOptions{Mode: WriteAt, Offset: -1}, "x", "again", ErrInvalid},
		{WriteOptions{Mode: 9}, "x", "again", ErrInvalid},
		{WriteOptions{Perm: 1 << 20}, "x", "again", ErrInvalid},
		{WriteOptions{NoCreate: true, Exclusive: true}, "x", "again", ErrInvalid},
	} {
		err := put(f, path, c.data, c.opts)
		if c.kind != "" {
			wantKind(t, err, c.kind)
		} else if err != nil {
			t.Errorf("%d: %v", i, err)
		}
		if got, _ := readBack(t, f, path, 0, 0); got != c.want {
			t.Errorf("%d: %q, want %q", i, got, c.want)
		}
	}
	if i, _ := f.Stat(path); i.Mode != 0o666 {
		t.Errorf("mode %o: umask applied, or lost by the atomic write", i.Mode)
	}
	if err := put(f, dir+"/new", "x", WriteOptions{Atomic: true, Exclusive: true, Perm: 0o4711}); err != nil {
		t.Error(err)
	}
	if i, _ := f.Stat(dir + "/new"); i.Mode != 0o4711 {
		t.Errorf("mode %o", i.Mode)
	}
	wantKind(t, put(f, dir+"/none", "x", WriteOptions{Atomic: true, NoCreate: true}), ErrNotFound)
	for _, bad := range []string{"/", dir + "/..", dir + "/."} {
		wantKind(t, put(f, bad, "x", WriteOptions{}), ErrInvalid)
	}
	// An atomic write keeps the owner, and goes through links.
	os.Chown(path, 1234, 50)
	os.Symlink("b/../b/file", dir+"/a/link")
	if err := put(f, dir+"/a/link", "linked", WriteOptions{Atomic: true}); err != nil {
		t.Error(err)
	}
	if i, _ := f.Stat(path); i.Owner != "alice" || i.Group != "staff" || i.Size != 6 {
		t.Errorf("after an atomic write: %+v", i)
	}
	os.Symlink("made", dir+"/dangling")
	os.Symlink("loop", dir+"/loop")
	for _, atomic := range []bool{true, false} {
		os.Remove(dir + "/made")
		if err := put(f, dir+"/dangling", "x", WriteOptions{Atomic: atomic}); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(dir + "/made"); err != nil {
			t.Error(err)
		}
		wantKind(t, put(f, dir+"/loop", "x", WriteOptions{Atomic: atomic}), ErrInvalid)
	}
}

func TestAbortLeavesNothing(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	file := writeTestFile(t, dir+"/file", "old", 0o600)
	w, err := f.OpenWrite(file, WriteOptions{Atomic: true})
	if err != nil {
		t.Fatal(err)
	}
	w.Write([]byte("new"))
	if d, _ := os.ReadDir(dir); len(d) != 2 {
		t.Errorf("no temporary file in the folder: %v", d)
	}
	w.Abort()
	w.Abort()
	if err := w.Commit(); err != nil {
		t.Error(err)
	}
	if _, err := w.Write([]byte("x")); err != ErrClosed {
		t.Error(err)
	}
	if err := expectFile(file, "old"); err != nil {
		t.Error(err)
	}
	if d, _ := os.ReadDir(dir); len(d) != 1 {
		t.Errorf("left behind: %v", d)
	}
	// The file is made meanwhile. An exclusive write must not overwrite it at the
	// end.
	w, err = f.OpenWrite(dir+"/x", WriteOptions{Atomic: true, Exclusive: true})
	if err != nil {
		t.Fatal(err)
	}
	writeTestFile(t, dir+"/x", "theirs", 0o600)
	wantKind(t, w.Commit(), ErrExists)
	if err := expectFile(dir+"/x", "theirs"); err != nil {
		t.Error(err)
	}
	if d, _ := os.ReadDir(dir); len(d) != 2 {
		t.Errorf("left behind: %v", d)
	}
}

func TestAtomicWriteUnderReaders(t *testing.T) {
	f := filesAs(t, "")
	path := openDir(t) + "/file"
	content := func(i int) string { return strings.Repeat(strconv.Itoa(i%10), 10_000) }
	if err := put(f, path, content(0), WriteOptions{Atomic: true}); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				b, err := os.ReadFile(path)
				if err != nil || len(b) != 10_000 || bytes.Count(b, b[:1]) != len(b) {
					t.Errorf("a reader saw %d bytes of a mixture: %v", len(b), err)
					return
				}
			}
		})
	}
	for i := range 60 {
		if err := put(f, path, content(i), WriteOptions{Atomic: true}); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
}

func TestAsUser(t *testing.T) {
	alice, root := filesAs(t, "alice"), filesAs(t, "")
	dir := openDir(t)
	secret := writeTestFile(t, dir+"/secret", "x", 0o600)
	staff := writeTestFile(t, dir+"/staff", "staff", 0o640)
	os.Chown(staff, 0, 50)
	os.Mkdir(dir+"/private", 0o700)
	os.Mkdir(dir+"/readonly", 0o755)
	writeTestFile(t, dir+"/readonly/file", "x", 0o644)
	check := func() {
		_, err := alice.OpenRead(secret, 0, 0)
		wantKind(t, err, ErrPermission)
		for _, atomic := range []bool{false, true} {
			wantKind(t, put(alice, secret, "x", WriteOptions{Atomic: atomic}), ErrPermission)
			wantKind(t, put(alice, dir+"/readonly/new", "x", WriteOptions{Atomic: atomic}), ErrPermission)
		}
		_, err = alice.Stat(dir + "/private/x")
		wantKind(t, err, ErrPermission)
		_, err = alice.List(dir+"/private", ListOptions{})
		wantKind(t, err, ErrPermission)
		_, err = alice.Watch(dir+"/private", false)
		wantKind(t, err, ErrPermission)
		wantKind(t, alice.Remove(dir+"/readonly/file", false), ErrPermission)
		wantKind(t, alice.Remove(dir+"/readonly", true), ErrPermission)
		wantKind(t, alice.Move(dir+"/readonly/file", dir+"/f", false), ErrPermission)
		wantKind(t, alice.Chmod(secret, 0o666), ErrPermission)
		wantKind(t, alice.Chown(secret, "alice", "", false), ErrPermission)
		wantKind(t, alice.Mkdir(dir+"/private/x", 0, true), ErrPermission)
		wantKind(t, alice.Symlink("x", dir+"/readonly/l"), ErrPermission)
	}
	check()
	if got, err := readBack(t, alice, staff, 0, 0); err != nil || got != "staff" {
		t.Errorf("supplementary group: %q %v", got, err)
	}
	if err := errors.Join(
		put(alice, dir+"/mine/plain", "x", WriteOptions{Parents: true}),
		put(alice, dir+"/mine/atomic", "x", WriteOptions{Atomic: true}),
		alice.Symlink("plain", dir+"/mine/link"),
	); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "/plain", "/atomic", "/link"} {
		if i, err := alice.Lstat(dir + "/mine" + name); err != nil || i.UID != 1234 || i.GID != 1234 || i.Owner != "alice" {
			t.Errorf("mine%s: %+v %v", name, i, err)
		}
	}
	wantKind(t, alice.Chown(dir+"/mine/plain", "root", "", false), ErrPermission)
	if err := alice.Chown(dir+"/mine/plain", "", "staff", true); err != nil {
		t.Error(err) // to a group that alice is in
	}
	// Writing to a setuid file clears the bit, as if alice had written herself.
	suid := writeTestFile(t, dir+"/suid", "x", 0o777)
	os.Chmod(suid, 0o777|os.ModeSetuid)
	if err := put(alice, suid, "y", WriteOptions{Mode: WriteAppend}); err != nil {
		t.Error(err)
	}
	if i, _ := root.Stat(suid); i.Mode != 0o777 {
		t.Errorf("mode of a setuid file after writing: %o", i.Mode)
	}
	// The rights apply to one call. Root's rights are not affected, even under load.
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				if _, err := alice.OpenRead(secret, 0, 0); !errors.Is(err, ErrPermission) {
					t.Errorf("alice: %v", err)
				}
				r, err := root.OpenRead(secret, 0, 0)
				if err != nil {
					t.Errorf("root: %v", err)
					return
				}
				r.Close()
			}
		})
	}
	wg.Wait()
	check()
	_, err := NewFiles(Accounts{Passwd: "/nowhere"}, "mallory")
	wantKind(t, err, ErrBadUser)
	if alice.Identity().UID != 1234 {
		t.Error("identity")
	}
}

func TestMkdirLinksAndModes(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	if err := errors.Join(f.Mkdir(dir+"/one", 0o1777, false), f.Mkdir(dir+"/a/b/c", 0o700, true), f.Mkdir(dir+"/a/b/c/", 0, true)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]uint32{"/one": 0o1777, "/a": 0o755, "/a/b/c": 0o700} {
		if i, err := f.Stat(dir + path); err != nil || i.Mode != want {
			t.Errorf("%s: %o %v", path, i.Mode, err)
		}
	}
	wantKind(t, f.Mkdir(dir+"/one", 0, false), ErrExists)
	wantKind(t, f.Mkdir(dir+"/x/y", 0, false), ErrNotFound)
	writeTestFile(t, dir+"/file", "x", 0o600)
	wantKind(t, f.Mkdir(dir+"/file/x", 0, true), ErrNotDirectory)
	wantKind(t, f.Mkdir(dir+"/file", 0, true), ErrNotDirectory)
	if err := f.Symlink("file", dir+"/link"); err != nil {
		t.Error(err)
	}
	if got, err := f.Readlink(dir + "/link"); got != "file" || err != nil {
		t.Error(got, err)
	}
	wantKind(t, f.Symlink("x", dir+"/link"), ErrExists)
	wantKind(t, f.Symlink("", dir+"/l2"), ErrInvalid)
	_, err := f.Readlink(dir + "/file")
	wantKind(t, err, ErrInvalid)
	if err := errors.Join(f.Chmod(dir+"/link", 0o4755), f.Chown(dir+"/link", "alice", "29", false), f.Chown(dir+"/file", "77", "", true)); err != nil {
		t.Error(err)
	}
	if i, _ := f.Lstat(dir + "/link"); i.UID != 1234 || i.GID != 29 {
		t.Errorf("link %+v", i)
	}
	if i, _ := f.Stat(dir + "/link"); i.UID != 77 || i.GID != 0 {
		t.Errorf("file %+v", i)
	}
	wantKind(t, f.Chmod(dir+"/file", 0o10000), ErrInvalid)
	wantKind(t, f.Chown(dir+"/file", "mallory", "", true), ErrBadUser)
	wantKind(t, f.Chown(dir+"/file", "", "mallory", true), ErrBadUser)
	for _, err := range []error{f.Mkdir("x", 0, true), f.Symlink("x", "x"), f.Chmod("x", 0), f.Chown("x", "", "", true), f.Remove("x", true), f.Move("x", "/y", true), f.Move("/x", "y", true)} {
		wantKind(t, err, ErrInvalid)
	}
	_, err = f.Readlink("x")
	wantKind(t, err, ErrInvalid)
}

func TestList(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	var want []string
	for _, d := range []string{"a", "a.b", "b"} {
		want = append(want, d)
		for _, s := range []string{"x", "y"} {
			want = append(want, d+"/"+s)
			os.MkdirAll(filepath.Join(dir, d, s), 0o755)
			for i := range 5 {
				n := d + "/" + s + "/" + strconv.Itoa(i)
				writeTestFile(t, filepath.Join(dir, n), "", 0o600)
				want = append(want, n)
			}
		}
	}
	os.Symlink("a", dir+"/link")
	want = append(want, "link")
	for _, limit := range []int{1, 2, 3, 7, 100} {
		var got []string
		token, pages := "", 0
		for {
			l, err := f.List(dir, ListOptions{Depth: 9, Limit: limit, Token: token})
			if err != nil {
				t.Fatal(err)
			}
			if len(l.Entries) > limit || (len(l.Entries) == 0 && l.Next != "") {
				t.Fatalf("%d entries, next %q", len(l.Entries), l.Next)
			}
			for _, e := range l.Entries {
				got = append(got, strings.TrimPrefix(e.Path, dir+"/"))
				if e.Name == "link" && e.Target != "a" {
					t.Errorf("%+v", e)
				}
			}
			pages++
			if token = l.Next; token == "" {
				break
			}
		}
		if strings.Join(got, " ") != strings.Join(want, " ") || pages != (len(want)+limit-1)/limit {
			t.Errorf("limit %d, %d pages: %v", limit, pages, got)
		}
	}
	l, err := f.List(dir, ListOptions{})
	if err != nil || len(l.Entries) != 4 || l.Next != "" {
		t.Errorf("depth 1: %+v %v", l, err)
	}
	if l, err := f.List(dir, ListOptions{Depth: 2, Token: "b/x"}); err != nil || len(l.Entries) != 2 {
		t.Errorf("depth 2 from b/x: %+v %v", l, err)
	}
	if l, err := f.List(dir, ListOptions{Token: "../../etc"}); err != nil || len(l.Entries) != 4 {
		t.Errorf("strange token: %+v %v", l, err)
	}
	if l, err := f.List("/", ListOptions{Limit: 1 << 30}); err != nil || l.Entries[0].Path[0] != '/' || strings.HasPrefix(l.Entries[0].Path, "//") {
		t.Errorf("/: %+v %v", l, err)
	}
	for _, err := range []error{
		func() error { _, err := f.List(dir, ListOptions{Depth: 65}); return err }(),
		func() error { _, err := f.List(dir, ListOptions{Token: strings.Repeat("x", 5000)}); return err }(),
		func() error { _, err := f.List("x", ListOptions{}); return err }(),
	} {
		wantKind(t, err, ErrInvalid)
	}
	_, err = f.List(dir+"/a/x/0", ListOptions{})
	wantKind(t, err, ErrNotDirectory)
	os.Chmod(dir+"/a", 0o700)
	if l, err := filesAs(t, "alice").List(dir, ListOptions{Depth: 9}); err != nil || l.Entries[0].Name != "a" || l.Entries[1].Name != "a.b" {
		t.Errorf("with an unreadable folder: %+v %v", l, err)
	}
}
