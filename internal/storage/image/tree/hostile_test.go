package tree

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestHostileArchives: each archive is refused with an error that names the
// entry, and files outside of the root do not change.
func TestHostileArchives(t *testing.T) {
	small := DefaultLimits()
	small.Bytes, small.Entries, small.Devices, small.Ratio, small.RatioFloor = 1<<20, 50, 3, 20, 1<<16
	var manyFiles, manyDevices []entry
	for i := range 60 {
		manyFiles = append(manyFiles, file(fmt.Sprintf("f%d", i), ""))
	}
	for i := range 5 {
		manyDevices = append(manyDevices, entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: fmt.Sprintf("dev%d", i), Devmajor: 1, Devminor: 3}})
	}
	loop := []entry{symlink("l0", "l1"), symlink("l1", "l0"), file("l0/x", "")}
	for _, c := range []struct {
		name    string
		layers  [][]entry
		entry   string // the name in the error
		says    string
		limits  *Limits
		compact bool // gzip-compressed
	}{
		{name: ".. in a name", layers: [][]entry{{file("../evil", "")}}, entry: "../evil", says: ".."},
		{name: ".. inside a name", layers: [][]entry{{file("a/../../evil", "")}}, entry: "a/../../evil", says: ".."},
		{name: ".. that would stay inside", layers: [][]entry{{file("a/../b", "")}}, entry: "a/../b", says: ".."},
		{name: "folder ..", layers: [][]entry{{dir("..")}}, entry: "..", says: ".."},
		{name: "absolute name", layers: [][]entry{{file("/etc/evil", "")}}, entry: "/etc/evil", says: "absolute"},
		{name: "absolute folder", layers: [][]entry{{dir("/")}}, entry: "/", says: "absolute"},
		{name: "relative link out, written through", layers: [][]entry{{symlink("l", "../outside"), file("l/evil", "")}}, entry: "l/evil", says: "out of the root"},
		{name: "the same in two layers", layers: [][]entry{{symlink("l", "../outside")}, {file("l/evil", "")}}, entry: "l/evil", says: "out of the root"},
		{name: "absolute link, written through", layers: [][]entry{{symlink("l", "/"), file("l/evil", "")}}, entry: "l/evil", says: "absolute"},
		{name: "link over link out", layers: [][]entry{{symlink("a", "b/c"), dir("b/"), symlink("b/c", "../../outside"), file("a/evil", "")}}, entry: "a/evil", says: "out of the root"},
		{name: "folder made through a link out", layers: [][]entry{{symlink("l", "../outside"), dir("l/evil/")}}, entry: "l/evil/", says: "out of the root"},
		{name: "whiteout through a link out", layers: [][]entry{{symlink("l", "../outside")}, {file("l/.wh.canary", "")}}, entry: "l/.wh.canary", says: "out of the root"},
		{name: "opaque through a link out", layers: [][]entry{{symlink("l", "../outside")}, {file("l/.wh..wh..opq", "")}}, entry: "l/.wh..wh..opq", says: "out of the root"},
		{name: "whiteout of ..", layers: [][]entry{{file("a/.wh...", "")}, {file("x", "")}, {file("a/b", ""), file("a/.wh...", "")}}, entry: "a/.wh...", says: "hides"},
		{name: "whiteout of .", layers: [][]entry{{dir("a/"), file("a/.wh..", "")}}, entry: "a/.wh..", says: "hides"},
		{name: "whiteout of nothing", layers: [][]entry{{dir("a/"), file("a/.wh.", "")}}, entry: "a/.wh.", says: "hides"},
		{name: "unknown kind of whiteout", layers: [][]entry{{dir("a/"), file("a/.wh..wh.plnk", "")}}, entry: "a/.wh..wh.plnk", says: "hides"},
		{name: "folder named as a whiteout", layers: [][]entry{{file(".wh.a/b", "")}}, entry: ".wh.a/b", says: "whiteouts"},
		{name: "folder named as a whiteout, deeper", layers: [][]entry{{file("x/.wh.a/b", "")}}, entry: "x/.wh.a/b", says: "whiteouts"},
		{name: "hard link out", layers: [][]entry{{hardlink("h", "../outside/canary")}}, entry: "h", says: ".."},
		{name: "hard link to an absolute path", layers: [][]entry{{hardlink("h", "/etc/passwd")}}, entry: "h", says: "absolute"},
		{name: "hard link through a link out", layers: [][]entry{{symlink("l", "../outside"), hardlink("h", "l/canary")}}, entry: "h", says: "out of the root"},
		{name: "hard link to nothing", layers: [][]entry{{hardlink("h", "none")}}, entry: "h", says: "none"},
		{name: "hard link to a folder", layers: [][]entry{{dir("d/"), hardlink("h", "d")}}, entry: "h", says: "folder"},
		{name: "hard link to itself", layers: [][]entry{{file("h", "1")}, {hardlink("h", "h")}}, entry: "h", says: "itself"},
		{name: "hard link to what it replaces", layers: [][]entry{{file("h/x", "1")}, {hardlink("h", "h/x")}}, entry: "h", says: "replaces"},
		{name: "hard link to the root", layers: [][]entry{{hardlink("h", ".")}}, entry: "h", says: "root"},
		{name: "below a file", layers: [][]entry{{file("f", ""), file("f/x", "")}}, entry: "f/x", says: "no folder"},
		{name: "below a device", layers: [][]entry{{manyDevices[0], file("dev0/x", "")}}, entry: "dev0/x", says: "no folder"},
		{name: "links in a circle", layers: [][]entry{loop}, entry: "l0/x", says: "links"},
		{name: "name twice", layers: [][]entry{{file("f", "1"), file("f", "2")}}, entry: "f", says: "another entry"},
		{name: "name twice, written differently", layers: [][]entry{{file("f", "1"), file("./f", "2")}}, entry: "./f", says: "another entry"},
		{name: "name twice, through a link", layers: [][]entry{{dir("d/"), symlink("l", "d"), file("d/f", "1"), file("l/f", "2")}}, entry: "l/f", says: "another entry"},
		{name: "file, then folder", layers: [][]entry{{file("f", "1"), dir("f/")}}, entry: "f/", says: "another entry"},
		{name: "folder, then file", layers: [][]entry{{dir("f/"), file("f", "1")}}, entry: "f", says: "another entry"},
		{name: "a file for a folder that this layer filled", layers: [][]entry{{file("d/x", "1"), file("d", "2")}}, entry: "d", says: "another entry"},
		{name: "root that is a file", layers: [][]entry{{file(".", "1")}}, entry: ".", says: "root is a folder"},
		{name: "unknown type", layers: [][]entry{{{Header: tar.Header{Typeflag: 'Z', Name: "z"}}}}, entry: "z", says: "type"},
		{name: "user that is none", layers: [][]entry{{file("f", "").with(func(h *tar.Header) { h.Uid = 1 << 32; h.Format = tar.FormatPAX })}}, entry: "f", says: "user"},
		{name: "user -1", layers: [][]entry{{file("f", "").with(func(h *tar.Header) { h.Gid = 1<<32 - 1 })}}, entry: "f", says: "user"},
		{name: "device numbers that Linux has not", layers: [][]entry{{{Header: tar.Header{Typeflag: tar.TypeBlock, Name: "b", Devmajor: 1 << 12, Devminor: 1}}}}, entry: "b", says: "device"},
		{name: "time that is none", layers: [][]entry{{file("f", "").with(func(h *tar.Header) { h.ModTime = stamp.AddDate(200, 0, 0); h.Format = tar.FormatPAX })}}, entry: "f", says: "time"},
		{name: "time of a device that is none", layers: [][]entry{{manyDevices[0].with(func(h *tar.Header) { h.ModTime = stamp.AddDate(-300, 0, 0); h.Format = tar.FormatPAX })}}, entry: "dev0", says: "time"},
		{name: "link to nothing", layers: [][]entry{{symlink("l", "")}}, entry: "l", says: "link to"},
		{name: "link that is too long", layers: [][]entry{{symlink("l", strings.Repeat("l/", 4000))}}, entry: "l", says: "link to"},
		{name: "capabilities that are none", layers: [][]entry{{file("f", "").with(func(h *tar.Header) { h.PAXRecords = map[string]string{paxXattr + Capability: "x"} })}}, entry: "f", says: Capability},
		{name: "attribute of a link", layers: [][]entry{{symlink("l", "f").with(func(h *tar.Header) { h.PAXRecords = map[string]string{paxXattr + "user.x": "x"} })}}, entry: "l", says: "user.x"},
		{name: "user of a link", layers: [][]entry{{symlink("l", "f").with(func(h *tar.Header) { h.Uid = 1 << 32; h.Format = tar.FormatPAX })}}, entry: "l", says: "user"},
		{name: "very long path", layers: [][]entry{{file(strings.Repeat("d/", 2000)+"f", "")}}, entry: "d/d/", says: "longer"},
		{name: "component that is too long", layers: [][]entry{{file(strings.Repeat("n", 300), "")}}, entry: "nnn", says: "too long"},
		{name: "many entries", layers: [][]entry{manyFiles}, limits: &small, entry: "f50", says: "50 entries"},
		{name: "many entries in two layers", layers: [][]entry{manyFiles[:30], manyFiles[30:]}, limits: &small, entry: "f50", says: "50 entries"},
		{name: "many devices", layers: [][]entry{manyDevices}, limits: &small, entry: "dev3", says: "devices"},
		{name: "large file", layers: [][]entry{{file("big", strings.Repeat("x", 1<<20+1))}}, limits: &small, entry: "big", says: "larger"},
		{name: "large files", layers: [][]entry{{file("a", strings.Repeat("x", 1<<19))}, {file("b", strings.Repeat("x", 1<<19+1))}}, limits: &small, entry: "b", says: "larger"},
		{name: "bomb", layers: [][]entry{{file("bomb", strings.Repeat("\x00", 1<<19))}}, limits: &small, compact: true, entry: "bomb", says: "20 times"},
	} {
		t.Run(c.name, func(t *testing.T) {
			limits := DefaultLimits()
			if c.limits != nil {
				limits = *c.limits
			}
			var layers [][]byte
			for _, l := range c.layers {
				b := archive(t, l...)
				if c.compact {
					b = gzipped(t, b)
				}
				layers = append(layers, b)
			}
			wantRefused(t, limits, c.entry, c.says, layers...)
		})
	}
}

// wantRefused unpacks beside a folder that must not change.
func wantRefused(t *testing.T, limits Limits, name, says string, layers ...[]byte) {
	t.Helper()
	top := t.TempDir()
	outside := filepath.Join(top, "outside")
	root := filepath.Join(top, "root")
	for _, d := range []string{outside, root} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(outside, "canary"), []byte("alive"), 0o600); err != nil {
		t.Fatal(err)
	}
	tr, err := New(root, limits)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for _, l := range layers {
		if _, err = tr.Apply(t.Context(), bytes.NewReader(l)); err != nil {
			break
		}
	}
	var refused *EntryError
	switch {
	case err == nil:
		t.Fatal("it was not refused")
	case !errors.As(err, &refused):
		t.Errorf("%v: it names no entry", err)
	case !strings.HasPrefix(refused.Name, name) || !strings.Contains(err.Error(), says):
		t.Errorf("got %v; want it to name %q and to say %q", err, name, says)
	}
	wantTree(t, outside, "canary=alive")
	if st := stat(t, filepath.Join(outside, "canary")); st.Nlink != 1 || st.Mode != unix.S_IFREG|0o600 {
		t.Errorf("the canary has %d links and mode %o", st.Nlink, st.Mode)
	}
	entries, err := os.ReadDir(top)
	if err != nil || len(entries) != 2 {
		t.Errorf("beside the root: %v, %v", entries, err)
	}
}

// TestAbsoluteNamesAllowed: absolute names are relative to the root.
func TestAbsoluteNamesAllowed(t *testing.T) {
	limits := DefaultLimits()
	limits.AbsoluteNames = true
	root, _, err := unpack(t, limits, archive(t, file("/app/x", "1"), hardlink("/app/h", "/app/x"), dir("run/"), symlink("var-run", "/run"), file("var-run/pid", "2")))
	if err != nil {
		t.Fatal(err)
	}
	wantTree(t, root, "app/", "app/x=1", "app/h=1", "run/", "run/pid=2", "var-run->/run")
	wantRefused(t, limits, "l/evil", "out of the root", archive(t, symlink("l", "/../outside"), file("l/evil", "")))
}

// TestDevicesAreNeverWrittenTo: an entry replaces a device of a lower layer,
// and no data is written to the device.
func TestDevicesAreNeverWrittenTo(t *testing.T) {
	root, _ := mustUnpack(t,
		archive(t, entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "full", Mode: 0o666, Devmajor: 1, Devminor: 7}}), // every write to it fails
		archive(t, file("full", "content")))
	wantTree(t, root, "full=content")
}

// TestBombs: the size of decompressed data is bounded, also after the archive's
// end, and so is the size of a sparse file.
func TestBombs(t *testing.T) {
	limits := DefaultLimits()
	limits.RatioFloor, limits.Ratio = 1<<20, 100
	zeros := make([]byte, 64<<20)
	for name, b := range map[string][]byte{
		"gzip behind the end": gzipped(t, append(archive(t, file("a", "1")), zeros...)),
		"zstd behind the end": zstded(t, append(archive(t, file("a", "1")), zeros...)),
		"zstd file":           zstded(t, archive(t, file("a", string(zeros)))),
		"sparse file":         sparseArchive(t, "sparse", 1<<30, 0, "x"),
	} {
		if _, _, err := unpack(t, limits, b); !errors.Is(err, ErrRefused) {
			t.Errorf("%s: %v; want it refused", name, err)
		}
	}
	limits = DefaultLimits()
	limits.Bytes = 1 << 20
	if _, _, err := unpack(t, limits, append(archive(t, file("a", "1")), zeros...)); !errors.Is(err, ErrRefused) {
		t.Errorf("more than an image may have: %v", err)
	}
}

// TestBrokenArchives: a truncated archive, or data that is not an archive, is
// an error.
func TestBrokenArchives(t *testing.T) {
	whole := archive(t, file("a", strings.Repeat("x", 10000)), file("b", "1"))
	zipped := gzipped(t, whole)
	flipped := bytes.Clone(zipped)
	flipped[len(flipped)-6] ^= 1 // its checksum
	for name, b := range map[string][]byte{
		"garbage":         bytes.Repeat([]byte("garbage!"), 200),
		"cut in a header": whole[:300],
		"cut in content":  whole[:5000],
		"cut gzip":        zipped[:len(zipped)-20],
		"broken gzip":     flipped,
		"gzip of nothing": zipped[:12],
		"cut zstd":        zstded(t, whole)[:40],
	} {
		if root, _, err := unpack(t, DefaultLimits(), b); err == nil {
			t.Errorf("%s: unpacked to %v", name, listing(t, root))
		}
	}
	if root, _, err := unpack(t, DefaultLimits(), nil); err != nil || len(listing(t, root)) != 0 {
		t.Errorf("an empty layer: %v", err)
	}
}

// sparseArchive writes a file that is a hole with one piece of data, in the PAX
// form 1.0 of sparse files. archive/tar can read that form but not write it.
func sparseArchive(t testing.TB, name string, size, at int64, data string) []byte {
	t.Helper()
	list := fmt.Sprintf("1\n%d\n%d\n", at, len(data))
	list += strings.Repeat("\x00", 512-len(list))
	e := file("GNUSparseFile.0/"+name, list+data)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	// The writer refuses these names: they replace other names of the same
	// length afterwards.
	e.PAXRecords = map[string]string{
		"XXX.sparse.major": "1", "XXX.sparse.minor": "0", "XXX.sparse.name": name, "XXX.sparse.realsize": fmt.Sprint(size),
	}
	if err := w.WriteHeader(&e.Header); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, e.content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return bytes.ReplaceAll(b.Bytes(), []byte("XXX.sparse."), []byte("GNU.sparse."))
}

func fileAt(t testing.TB, path string, at int64, n int) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, n)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	return string(b)
}
