package snapshot

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"testing/iotest"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal/sealtest"
)

// TestStreamLayer: a stream becomes a layer, sealed in a private snapshot. A
// stream that is too long, truncated or not a layer leaves no files.
func TestStreamLayer(t *testing.T) {
	content := bytes.Repeat([]byte(canary), 3*page)[:3*page]
	w := layer.NewWriter(io.Discard)
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	want := w.Ref()
	k := key(t)
	for name, opts := range map[string][]Option{"plain": nil, "sealed": {Sealed(k)}} {
		t.Run(name, func(t *testing.T) {
			home := t.TempDir()
			s, err := Make(filepath.Join(home, "s"), func(b *Builder) (*Snapshot, error) {
				cut := io.MultiReader(bytes.NewReader(content[:page]), iotest.ErrReader(os.ErrClosed))
				gone, cancel := context.WithCancel(t.Context())
				cancel()
				for what, try := range map[string]func() (layer.Ref, error){
					"too long":  func() (layer.Ref, error) { return b.StreamLayer(t.Context(), bytes.NewReader(content), 2*page) },
					"cut off":   func() (layer.Ref, error) { return b.StreamLayer(t.Context(), cut, 3*page) },
					"no layer":  func() (layer.Ref, error) { return b.StreamLayer(t.Context(), bytes.NewReader(content[:100]), page) },
					"cancelled": func() (layer.Ref, error) { return b.StreamLayer(gone, bytes.NewReader(content), 3*page) },
				} {
					if ref, err := try(); err == nil {
						t.Errorf("%s: %+v", what, ref)
					}
				}
				if ref, err := b.StreamLayer(t.Context(), bytes.NewReader(nil), page); err != nil || ref != (layer.Ref{}) {
					t.Errorf("of nothing: %+v, %v", ref, err)
				}
				if left := names(t, b.layers.Name()); len(left) != 0 {
					t.Errorf("what failed has left %v", left)
				}
				for range 2 { // the second time the layer exists
					ref, err := b.StreamLayer(t.Context(), bytes.NewReader(content), 3*page)
					if err != nil || ref != want {
						return nil, errors.Join(err, errors.New("another layer"))
					}
				}
				return b.Commit(manifest(want, want), []byte("state"))
			}, opts...)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			if found := sealtest.FilesWith(t, home, canary); (len(found) > 0) != (opts == nil) {
				t.Errorf("in the clear in %v", found)
			}
			if err := s.Verify(t.Context()); err != nil {
				t.Error(err)
			}
			if got := s.Manifest().MemoryLayers(); len(got) != 1 || got[0] != want {
				t.Errorf("memory: %v", got)
			}
			unsealed, err := s.UnsealedLayers()
			if err != nil || (len(unsealed) == 1) != (opts != nil) {
				t.Errorf("sealed disks: %v, %v", unsealed, err)
			}
		})
	}
}
