package tree

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func fuzzLimits() Limits {
	limits := DefaultLimits()
	limits.Bytes, limits.Entries, limits.Devices, limits.RatioFloor = 4<<20, 200, 20, 1<<20
	return limits
}

// wantConfined applies layers beside a folder with a canary. For any layers, no
// file outside of the root is made, changed or removed, and an accepted tree can
// be finished.
func wantConfined(t *testing.T, limits Limits, layers ...[]byte) {
	top := t.TempDir()
	outside, root := filepath.Join(top, "outside"), filepath.Join(top, "root")
	for _, d := range []string{outside, root} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(outside, "canary"), []byte("alive"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := stat(t, filepath.Join(outside, "canary"))
	tr, err := New(root, limits)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for _, l := range layers {
		if _, err := tr.Apply(t.Context(), bytes.NewReader(l)); err != nil {
			break
		}
		if _, err := tr.Finish(); err != nil {
			t.Fatalf("a tree that was taken could not be finished: %v", err)
		}
	}
	after := stat(t, filepath.Join(outside, "canary"))
	if after.Ino != before.Ino || after.Nlink != 1 || after.Mode != before.Mode || after.Uid != before.Uid || after.Mtim != before.Mtim {
		t.Errorf("the file outside was %+v, is %+v", before, after)
	}
	if got := strings.Join(listing(t, outside), " "); got != "canary=alive" {
		t.Errorf("outside there is %s", got)
	}
	if entries, err := os.ReadDir(top); err != nil || len(entries) != 2 {
		t.Errorf("beside the root: %v, %v", entries, err)
	}
}

// fuzzParts are the parts of names in fuzzed layers.
var fuzzParts = []string{
	"a", "b", "c", "canary", "..", ".", "", "outside", ".wh.a", ".wh.b", ".wh..wh..opq", ".wh...", "root", "d", ".wh.c", "\xff",
}

// fuzzName has up to three parts; a bit says whether it starts with /.
func fuzzName(code [2]byte) string {
	parts := []string{fuzzParts[code[0]&15], fuzzParts[code[0]>>4], fuzzParts[code[1]&15]}
	name := strings.Join(parts[:1+int(code[1]>>4)%3], "/")
	if code[1]&0x80 != 0 {
		name = "/" + name
	}
	return name
}

// fuzzLayers reads entries of six bytes: type, name, link, mode.
func fuzzLayers(script []byte) (layers [][]byte) {
	const nextLayer = 9
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	next := func() {
		if w.Close() == nil {
			layers = append(layers, bytes.Clone(b.Bytes()))
		}
		b.Reset()
		w = tar.NewWriter(&b)
	}
	for ; len(script) >= 6 && len(layers) < 4; script = script[6:] {
		kind := script[0] % (nextLayer + 1)
		if kind == nextLayer {
			next()
			continue
		}
		h := tar.Header{
			Typeflag: "0123456SZ"[kind], Name: fuzzName([2]byte(script[1:3])), Linkname: fuzzName([2]byte(script[3:5])),
			Mode: int64(script[5]) << 4, Uid: int(script[5]) << 10, Devminor: int64(script[5]),
		}
		if h.Typeflag == 'S' {
			h.Typeflag = tar.TypeReg
			h.PAXRecords = map[string]string{paxXattr + "user.x": "y", paxXattr + Capability: capNetRaw}
		}
		if h.Typeflag != tar.TypeLink && h.Typeflag != tar.TypeSymlink {
			h.Linkname = ""
		}
		_ = w.WriteHeader(&h) // an entry that the writer refuses cannot be in an archive
	}
	next()
	return layers
}

// FuzzApplyLayer makes layers of entries that conflict with each other.
func FuzzApplyLayer(f *testing.F) {
	for _, seed := range []string{
		"\x05\x00\x00\x00\x00\x10\x00\x10\x10\x00\x00\x10\x01\x01\x00\x10\x10\x10", // folder, file in it, hard link to that
		"\x02\x00\x00\x74\x10\x00\x00\x30\x10\x00\x00\x00",                         // a link out, written through
		"\x02\x00\x00\x07\x80\x00\x00\x30\x10\x00\x00\x00",                         // an absolute link
		"\x00\x00\x10\x00\x00\x10\x09000000\x00\x80\x10\x00\x00\x00",               // a whiteout in a second layer
		"\x05\x00\x00\x00\x00\x10\x09000000\x00\xa0\x10\x00\x00\x00\x06\x00\x00\x00\x00\x00",
	} {
		f.Add([]byte(seed), false)
		f.Add([]byte(seed), true)
	}
	f.Fuzz(func(t *testing.T, script []byte, absolute bool) {
		limits := fuzzLimits()
		limits.AbsoluteNames = absolute
		wantConfined(t, limits, fuzzLayers(script)...)
	})
}

// FuzzReadLayer applies arbitrary bytes as a layer.
func FuzzReadLayer(f *testing.F) {
	small := archive(f, file("a", "1"))
	f.Add(small)
	f.Add(gzipped(f, small))
	f.Add(zstded(f, small))
	f.Add(archive(f, file("c", "x").with(func(h *tar.Header) { h.PAXRecords = map[string]string{paxXattr + "user.x": "y"} })))
	f.Add(sparseArchive(f, "sparse", 1<<20, 4096, "x"))
	f.Fuzz(func(t *testing.T, layer []byte) { wantConfined(t, fuzzLimits(), layer) })
}
