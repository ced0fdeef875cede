package snapshot

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/storage/layer"
	"golang.org/x/sys/unix"
)

// TestFillLayer: a layer is written in pieces, with holes between them.
func TestFillLayer(t *testing.T) {
	memory, mf := layerFile(t, 1, 2)
	zeros, zf := layerFile(t, 0, 300)
	dir := filepath.Join(t.TempDir(), "s")
	b, err := NewBuilder(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Abort() }() // after Commit it does nothing
	copyOf := func(from *os.File) func(*os.File) error {
		return func(to *os.File) error {
			buf := make([]byte, page)
			for off := int64(page); off >= 0; off -= page {
				_, err := from.ReadAt(buf, off)
				if _, werr := to.WriteAt(buf, off); errors.Join(err, werr) != nil {
					return errors.Join(err, werr)
				}
			}
			return nil
		}
	}
	no := errors.New("no")
	wantError(t, b.FillLayer(t.Context(), memory, func(*os.File) error { return no }), "fill layer", "no")
	wantError(t, b.FillLayer(t.Context(), memory, func(*os.File) error { return nil }), "is damaged")
	wantError(t, b.FillLayer(t.Context(), memory, func(f *os.File) error { return f.Truncate(page) }), "are expected")
	if left := names(t, filepath.Join(filepath.Dir(dir), b.temp, layersName)); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
	for ref, f := range map[layer.Ref]*os.File{memory: mf, zeros: zf} {
		fill := copyOf(f)
		if ref == zeros {
			fill = func(*os.File) error { return nil }
		}
		for range 2 { // the second time the layer exists
			if err := b.FillLayer(t.Context(), ref, fill); err != nil {
				t.Fatal(err)
			}
		}
	}
	s, err := b.Commit(manifest(memory, zeros), state)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }() // only read from
	if err := s.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, layersName, zeros.Digest.String()), &st); err != nil || st.Blocks != 0 || st.Mode&0o222 != 0 {
		t.Errorf("300 pages of zeros have %d blocks and mode %o: %v", st.Blocks, st.Mode, err)
	}
	wantError(t, b.FillLayer(t.Context(), memory, nil), "committed or aborted")
}

// TestParseManifest: ParseManifest and Encode are inverse to each other.
func TestParseManifest(t *testing.T) {
	s := build(t, filepath.Join(t.TempDir(), "s"))
	raw, err := s.Manifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	m, err := ParseManifest(raw)
	if err != nil {
		t.Fatal(err)
	}
	again, err := m.Encode()
	if err != nil || string(again) != string(raw) {
		t.Errorf("%s became %s, %v", raw, again, err)
	}
	_, err = ParseManifest(append(raw, ' '))
	wantError(t, err, "canonical")
}
