package tree

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// capNetRaw is the security.capability attribute of a program with
// cap_net_raw=ep, in version 2 of its format (linux/capability.h).
const capNetRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// TestLayers: how layers change each other's entries.
func TestLayers(t *testing.T) {
	base := []entry{dir("d/"), file("d/a", "1"), file("d/b", "2"), dir("d/sub/"), file("d/sub/x", "3"), file("top", "4")}
	for _, c := range []struct {
		name   string
		layers [][]entry
		want   []string
	}{
		{"one", [][]entry{base}, []string{"d/", "d/a=1", "d/b=2", "d/sub/", "d/sub/x=3", "top=4"}},
		{"file replaced", [][]entry{base, {file("top", "new")}}, []string{"d/", "d/a=1", "d/b=2", "d/sub/", "d/sub/x=3", "top=new"}},
		{"whiteout of a file", [][]entry{base, {file("d/.wh.a", "")}}, []string{"d/", "d/b=2", "d/sub/", "d/sub/x=3", "top=4"}},
		{"whiteout of a folder", [][]entry{base, {file("d/.wh.sub", "")}}, []string{"d/", "d/a=1", "d/b=2", "top=4"}},
		{"whiteout of nothing", [][]entry{base, {file("d/.wh.none", ""), file("no/folder/.wh.x", "")}}, []string{"d/", "d/a=1", "d/b=2", "d/sub/", "d/sub/x=3", "top=4"}},
		{"opaque", [][]entry{base, {dir("d/"), file("d/.wh..wh..opq", ""), file("d/n", "5")}}, []string{"d/", "d/n=5", "top=4"}},
		{"opaque after what it must not hide", [][]entry{base, {file("d/sub/n", "5"), file("d/.wh..wh..opq", "")}}, []string{"d/", "d/sub/", "d/sub/n=5", "top=4"}},
		{"whiteout before its replacement", [][]entry{base, {file(".wh.d", ""), dir("d/"), file("d/n", "5")}}, []string{"d/", "d/n=5", "top=4"}},
		{"whiteout after its replacement", [][]entry{base, {dir("d/"), file("d/n", "5"), file(".wh.d", ""), file("top", "6"), file(".wh.top", "")}}, []string{"d/", "d/n=5", "top=6"}},
		{"opaque root", [][]entry{base, {file(".wh..wh..opq", ""), file("n", "5")}}, []string{"n=5"}},
		{"folder replaced by file", [][]entry{base, {file("d", "5")}}, []string{"d=5", "top=4"}},
		{"file replaced by folder", [][]entry{base, {dir("top/"), file("top/n", "5")}}, []string{"d/", "d/a=1", "d/b=2", "d/sub/", "d/sub/x=3", "top/", "top/n=5"}},
		{"folder replaced by link", [][]entry{base, {symlink("d", "top")}}, []string{"d->top", "top=4"}},
		{"link replaced by folder", [][]entry{{symlink("l", "t"), dir("t/")}, {dir("l/"), file("l/n", "5")}}, []string{"l/", "l/n=5", "t/"}},
		{"link replaced by file", [][]entry{{file("t", "1"), symlink("l", "t")}, {file("l", "5")}}, []string{"l=5", "t=1"}},
		{"through a link to a folder", [][]entry{{dir("usr/lib/"), symlink("lib", "usr/lib")}, {file("lib/n", "5")}}, []string{"lib->usr/lib", "usr/", "usr/lib/", "usr/lib/n=5"}},
		{"through a link with .. that stays inside", [][]entry{{dir("a/b/"), dir("c/"), symlink("a/b/l", "../../c")}, {file("a/b/l/n", "5")}}, []string{"a/", "a/b/", "a/b/l->../../c", "c/", "c/n=5"}},
		{"folders that no entry makes", [][]entry{{file("x/y/z", "1")}}, []string{"x/", "x/y/", "x/y/z=1"}},
		{"a folder twice", [][]entry{{dir("x/"), file("x/a", "1"), dir("x/")}}, []string{"x/", "x/a=1"}},
		{"./ and the root itself", [][]entry{{dir("./"), file("./x", "1")}}, []string{"x=1"}},
		{"absolute links are content", [][]entry{{symlink("l", "/etc/passwd"), symlink("up", "../../..")}}, []string{"l->/etc/passwd", "up->../../.."}},
		{"hard link replaced", [][]entry{{file("a", "1"), hardlink("b", "a")}, {file("a", "2")}}, []string{"a=2", "b=1"}},
		{"hard link to a lower layer", [][]entry{{file("a", "1")}, {hardlink("b", "a")}}, []string{"a=1", "b=1"}},
		{"whiteout of a link to a folder", [][]entry{{dir("t/"), file("t/x", "1"), symlink("l", "t")}, {file(".wh.l", "")}}, []string{"t/", "t/x=1"}},
		{"hidden folders", [][]entry{{dir(".a/"), symlink(".a/l", ".b"), dir(".a/.b/"), file(".a/.b/x", "1")}, {symlink(".a/.b/y", "x"), file(".a/l/z", "2"), hardlink(".a/h", ".a/.b/x"), file(".a/.b/.wh.x", "")}}, []string{".a/", ".a/.b/", ".a/.b/y->x", ".a/.b/z=2", ".a/h=1", ".a/l->.b"}},
		{"global header", [][]entry{{{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"comment": "x"}}}, file("a", "1")}}, []string{"a=1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var layers [][]byte
			for _, l := range c.layers {
				layers = append(layers, archive(t, l...))
			}
			root, _ := mustUnpack(t, layers...)
			wantTree(t, root, c.want...)
		})
	}
}

// TestMetadata: modes, owners, times, devices, attributes and long names.
func TestMetadata(t *testing.T) {
	long := strings.Repeat("long-name-", 20) // more than a header holds
	deep := strings.Repeat("deep/", 60) + "file"
	layer := archive(t,
		dir("d/").with(func(h *tar.Header) { h.Mode = 0o1777; h.Uid, h.Gid = 5, 6 }),
		file("d/suid", "x").with(func(h *tar.Header) { h.Mode = 0o4755; h.Uid, h.Gid = 70000, 4294967294 }),
		file("d/sgid", "x").with(func(h *tar.Header) { h.Mode = 0o2711; h.Uid = 1 }),
		file("d/cap", "x").with(func(h *tar.Header) {
			h.Mode, h.Uid = 0o755, 7
			h.PAXRecords = map[string]string{
				paxXattr + Capability: capNetRaw, paxXattr + "user.note": "kept",
				paxXattr + "security.selinux": "system_u:object_r:bin_t:s0", paxXattr + "trusted.overlay.opaque": "y",
			}
		}),
		symlink("d/link", "nowhere").with(func(h *tar.Header) { h.Uid, h.Gid = 8, 9 }),
		entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "d/null", Mode: 0o666, Devmajor: 1, Devminor: 3, ModTime: stamp}},
		entry{Header: tar.Header{Typeflag: tar.TypeBlock, Name: "d/disk", Mode: 0o660, Devmajor: 259, Devminor: 70000, Gid: 6, ModTime: stamp}},
		entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "d/fifo", Mode: 0o600, ModTime: stamp}},
		hardlink("d/hard", "d/suid"),
		file("d/"+long, "long"),
		file(deep, "deep"),
		file("d/nano", "x").with(func(h *tar.Header) {
			h.ModTime = stamp.Add(123456789 * time.Nanosecond)
			h.Format = tar.FormatPAX
		}),
		file("d/ünï", "name"),
	)
	// A later layer changes the folder; its time remains that of its entry. The
	// root has attributes, too.
	root, facts := mustUnpack(t, layer, archive(t, file("d/later", "x"), dir("./").with(func(h *tar.Header) {
		h.Mode = 0o750
		h.PAXRecords = map[string]string{paxXattr + "user.root": "x"}
	})))
	at := func(name string) unix.Stat_t { return stat(t, filepath.Join(root, name)) }
	for _, c := range []struct {
		name          string
		mode          uint32
		uid, gid      uint32
		dev           uint64
		links         uint64
		nanoseconds   int64
		size          int64
		skipSizeCheck bool
	}{
		{name: ".", mode: unix.S_IFDIR | 0o750, links: 4, skipSizeCheck: true},
		{name: "d", mode: unix.S_IFDIR | 0o1777, uid: 5, gid: 6, links: 2, skipSizeCheck: true},
		{name: "d/suid", mode: unix.S_IFREG | 0o4755, uid: 70000, gid: 4294967294, links: 2, size: 1},
		{name: "d/hard", mode: unix.S_IFREG | 0o4755, uid: 70000, gid: 4294967294, links: 2, size: 1},
		{name: "d/sgid", mode: unix.S_IFREG | 0o2711, uid: 1, links: 1, size: 1},
		{name: "d/cap", mode: unix.S_IFREG | 0o755, uid: 7, links: 1, size: 1},
		{name: "d/link", mode: unix.S_IFLNK | 0o777, uid: 8, gid: 9, links: 1, size: 7},
		{name: "d/null", mode: unix.S_IFCHR | 0o666, dev: unix.Mkdev(1, 3), links: 1},
		{name: "d/disk", mode: unix.S_IFBLK | 0o660, gid: 6, dev: unix.Mkdev(259, 70000), links: 1},
		{name: "d/fifo", mode: unix.S_IFIFO | 0o600, links: 1},
		{name: "d/" + long, mode: unix.S_IFREG | 0o644, links: 1, size: 4},
		{name: deep, mode: unix.S_IFREG | 0o644, links: 1, size: 4},
		{name: "d/nano", mode: unix.S_IFREG | 0o644, links: 1, size: 1, nanoseconds: 123456789},
		{name: "d/ünï", mode: unix.S_IFREG | 0o644, links: 1, size: 4},
	} {
		st := at(c.name)
		if st.Mode != c.mode || st.Uid != c.uid || st.Gid != c.gid || st.Rdev != c.dev || st.Nlink != c.links || !c.skipSizeCheck && st.Size != c.size {
			t.Errorf("%s: mode %o, owner %d:%d, device %#x, %d links, %d bytes; want %o, %d:%d, %#x, %d, %d",
				c.name, st.Mode, st.Uid, st.Gid, st.Rdev, st.Nlink, st.Size, c.mode, c.uid, c.gid, c.dev, c.links, c.size)
		}
		if st.Mtim.Sec != stamp.Unix() || st.Mtim.Nsec != c.nanoseconds {
			t.Errorf("%s: time %d.%09d, want %d.%09d", c.name, st.Mtim.Sec, st.Mtim.Nsec, stamp.Unix(), c.nanoseconds)
		}
	}
	for name, want := range map[string]string{Capability: capNetRaw, "user.note": "kept", "security.selinux": "", "trusted.overlay.opaque": ""} {
		buf := make([]byte, 256)
		n, err := unix.Lgetxattr(filepath.Join(root, "d/cap"), name, buf)
		if err != nil && !errors.Is(err, unix.ENODATA) {
			t.Errorf("%s: %v", name, err)
		} else if got := string(buf[:max(n, 0)]); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if !slices.Equal(facts.WithXattrs, []string{"/", "/d/cap"}) || !slices.Equal(facts.Capabilities, []string{"/d/cap"}) || !slices.Equal(facts.DroppedXattrs, []string{"security.selinux", "trusted.overlay.opaque"}) {
		t.Errorf("facts: %+v", facts)
	}
	surveyed, err := Survey(root)
	if err != nil || !slices.Equal(surveyed.WithXattrs, facts.WithXattrs) || !slices.Equal(surveyed.Capabilities, facts.Capabilities) {
		t.Errorf("surveyed: %+v, %v", surveyed, err)
	}
}

// TestUmask: modes come from the layers, or have defaults, independent of the
// umask.
func TestUmask(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	root, _ := mustUnpack(t, archive(t, file("implied/f", "1").with(func(h *tar.Header) { h.Mode = 0o666 })))
	for name, want := range map[string]uint32{".": unix.S_IFDIR | 0o755, "implied": unix.S_IFDIR | 0o755, "implied/f": unix.S_IFREG | 0o666} {
		if st := stat(t, filepath.Join(root, name)); st.Mode != want {
			t.Errorf("%s has mode %o, want %o", name, st.Mode, want)
		}
	}
	if st := stat(t, root); st.Mtim.Sec != 0 {
		t.Errorf("the root's time is %d", st.Mtim.Sec)
	}
}

// TestFactsOfTheResult: a capability that a later layer removes is not listed.
func TestFactsOfTheResult(t *testing.T) {
	withCap := file("ping", "x").with(func(h *tar.Header) { h.PAXRecords = map[string]string{paxXattr + Capability: capNetRaw} })
	for name, second := range map[string][]entry{"replaced": {file("ping", "y")}, "hidden": {file(".wh.ping", "")}} {
		if _, facts := mustUnpack(t, archive(t, withCap), archive(t, second...)); len(facts.WithXattrs) != 0 || len(facts.Capabilities) != 0 {
			t.Errorf("%s: %+v", name, facts)
		}
	}
}

// TestCompressions: gzip, zstd and no compression are recognized by content.
// The DiffID is the digest of the uncompressed archive, including the bytes
// after its end.
func TestCompressions(t *testing.T) {
	plain := append(archive(t, file("a", strings.Repeat("content ", 1000))), make([]byte, 8192)...)
	want := sha256.Sum256(plain)
	for name, b := range map[string][]byte{"none": plain, "gzip": gzipped(t, plain), "zstd": zstded(t, plain),
		"gzip in two members": append(gzipped(t, plain[:100]), gzipped(t, plain[100:])...)} {
		root := t.TempDir()
		tr, err := New(root, DefaultLimits())
		if err != nil {
			t.Fatal(err)
		}
		got, err := tr.Apply(t.Context(), bytes.NewReader(b))
		if err != nil || got != want {
			t.Errorf("%s: DiffID %x, %v; want %x", name, got, err, want)
		}
		wantTree(t, root, "a="+strings.Repeat("content ", 1000))
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestSparse: holes remain holes, whether the archive marks them or contains
// zeros.
func TestSparse(t *testing.T) {
	const size = 8 << 20
	content := make([]byte, size)
	copy(content[5<<20:], "data in the middle")
	root, _ := mustUnpack(t, archive(t, file("zeros", string(content))), sparseArchive(t, "sparse", size, 5<<20, "data in the middle"))
	for _, name := range []string{"zeros", "sparse"} {
		st := stat(t, filepath.Join(root, name))
		if st.Size != size || st.Blocks*512 > 1<<20 {
			t.Errorf("%s: %d bytes in %d", name, st.Size, st.Blocks*512)
		}
		if got := fileAt(t, filepath.Join(root, name), 5<<20, 18); got != "data in the middle" {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestMakeFolder(t *testing.T) {
	root := t.TempDir()
	tr, err := New(root, DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if _, err := tr.Apply(t.Context(), bytes.NewReader(archive(t, symlink("srv", "/data"), dir("data/"), file("f", "1")))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"/srv/app", "/new/deep", "/", "/data"} {
		if err := tr.MakeFolder(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"/../x", "/f/x"} {
		if err := tr.MakeFolder(name); !errors.Is(err, ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantTree(t, root, "srv->/data", "data/", "data/app/", "new/", "new/deep/", "f=1")
}

func TestApplyIsCancelled(t *testing.T) {
	tr, err := New(t.TempDir(), DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	if _, err := tr.Apply(ctx, bytes.NewReader(archive(t, file("a", "1")))); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
}
