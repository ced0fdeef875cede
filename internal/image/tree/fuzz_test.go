package tree

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzApplyLayer: whatever two layers hold, nothing outside of the root is made,
// changed or removed, and nothing panics.
func FuzzApplyLayer(f *testing.F) {
	seeds := [][]byte{
		archive(f, dir("d/"), file("d/a", "1"), symlink("l", "d"), hardlink("h", "d/a")),
		archive(f, file("d/.wh.a", ""), file("d/.wh..wh..opq", ""), file("l/x", "2")),
		archive(f, symlink("l", "../outside"), file("l/evil", "")),
		archive(f, symlink("l", "/"), file("l/evil", "")),
		archive(f, entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "p"}}, file("p/x", "")),
		archive(f, file("c", "x").with(func(h *tar.Header) { h.PAXRecords = map[string]string{paxXattr + "user.x": "y"} })),
		gzipped(f, archive(f, file("a", "1"))), zstded(f, archive(f, file("a", "1"))),
		sparseArchive(f, "sparse", 1<<20, 4096, "x"),
	}
	for _, a := range seeds {
		for _, b := range seeds[:4] {
			f.Add(a, b, false)
		}
		f.Add(a, a, true)
	}
	limits := DefaultLimits()
	limits.Bytes, limits.Entries, limits.Devices, limits.RatioFloor = 4<<20, 200, 20, 1<<20
	f.Fuzz(func(t *testing.T, first, second []byte, absolute bool) {
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
		limits := limits
		limits.AbsoluteNames = absolute
		tr, err := New(root, limits)
		if err != nil {
			t.Fatal(err)
		}
		defer tr.Close()
		for _, l := range [][]byte{first, second} {
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
	})
}
