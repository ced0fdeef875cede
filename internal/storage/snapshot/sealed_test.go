package snapshot

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/seal/sealtest"
)

func key(t *testing.T) *seal.Key {
	t.Helper()
	k, err := seal.Generate()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// canary fills the state and the layers of a private snapshot.
const canary = "sk-live-0123456789-canary"

func canaryLayer(t *testing.T, pages int) (layer.Ref, *os.File) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "layer"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	w := layer.NewWriter(f)
	content := bytes.Repeat([]byte(canary), pages*page/len(canary)+1)[:pages*page]
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	return w.Ref(), f
}

// buildPrivate makes a private snapshot whose disk is a layer of a plain one.
func buildPrivate(t *testing.T, dir string, k *seal.Key, plain *Snapshot) (*Snapshot, layer.Ref) {
	t.Helper()
	memory, f := canaryLayer(t, 50)
	shared := layer.Ref(plain.Manifest().Disks[0].Stack.Layers[0])
	s, err := Make(dir, func(b *Builder) (*Snapshot, error) {
		if !b.Private() {
			t.Error("it is not private")
		}
		if err := errors.Join(b.AddLayer(memory, f), b.LinkLayer(shared, plain)); err != nil {
			return nil, err
		}
		return b.Commit(manifest(memory, shared), []byte(canary))
	}, Sealed(k))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, memory
}

func TestPrivate(t *testing.T) {
	home := t.TempDir()
	k := key(t)
	plain := build(t, filepath.Join(home, "plain"))
	dir := filepath.Join(home, "private")
	s, memory := buildPrivate(t, dir, k, plain)
	if found := sealtest.FilesWith(t, home, canary); found != nil {
		t.Fatalf("in the clear in %v", found)
	}
	if !s.Manifest().Private || s.Manifest().Format != FormatPrivate || string(s.State()) != canary {
		t.Errorf("%+v, state %q", s.Manifest(), s.State())
	}
	// A shared layer stays shared.
	shared := s.Manifest().Disks[0].Stack.Layers[0].Digest.String()
	want := []string{shared, memory.Digest.String() + sealedSuffix}
	slices.Sort(want)
	if got := names(t, filepath.Join(dir, layersName)); !slices.Equal(got, want) {
		t.Errorf("layers are %v, want %v", got, want)
	}

	// It can be opened only with the key; without it only the manifest can be
	// read.
	again, err := Open(dir, WithKey(k))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := again.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	f, err := again.OpenLayer(memory)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if b, err := io.ReadAll(f); err != nil || uint64(len(b)) != memory.Size || !bytes.HasPrefix(b, []byte(canary)) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if _, err := f.Write([]byte{1}); err == nil {
		t.Error("a layer was written to")
	}
	if _, err := Open(dir); !errors.Is(err, ErrPrivate) {
		t.Errorf("without a key: %v", err)
	}
	if _, err := Open(dir, WithKey(key(t))); !errors.Is(err, seal.ErrKey) {
		t.Errorf("with another key: %v", err)
	}
	if m, err := ReadManifest(dir); err != nil || len(m.Layers()) != 2 {
		t.Errorf("%+v, %v", m, err)
	}
}

// TestPrivateStaysPrivate: a snapshot made from a private snapshot is sealed,
// too.
func TestPrivateStaysPrivate(t *testing.T) {
	home := t.TempDir()
	k := key(t)
	plain := build(t, filepath.Join(home, "plain"))
	s, memory := buildPrivate(t, filepath.Join(home, "private"), k, plain)
	clone, err := s.Clone(filepath.Join(home, "clone"))
	if err != nil {
		t.Fatal(err)
	}
	defer clone.Close()
	if err := clone.Verify(t.Context()); err != nil || !clone.Manifest().Private || string(clone.State()) != canary {
		t.Errorf("%+v, %v", clone.Manifest(), err)
	}
	a, err1 := os.Stat(filepath.Join(home, "private", layersName, memory.Digest.String()+sealedSuffix))
	b, err2 := os.Stat(filepath.Join(home, "clone", layersName, memory.Digest.String()+sealedSuffix))
	if errors.Join(err1, err2) != nil || !os.SameFile(a, b) {
		t.Error("the sealed layer is not shared", err1, err2)
	}
	// Neither its layers nor its manifest get into a snapshot that is not
	// private.
	_, err = Make(filepath.Join(home, "leak"), func(b *Builder) (*Snapshot, error) {
		if err := b.LinkLayer(memory, s); !errors.Is(err, ErrPrivate) {
			t.Errorf("link: %v", err)
		}
		f, err := s.OpenLayer(memory)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		if err := errors.Join(b.AddLayer(memory, f), b.LinkLayer(layer.Ref(s.Manifest().Disks[0].Stack.Layers[0]), plain)); err != nil {
			return nil, err
		}
		return b.Commit(s.Manifest(), s.State())
	})
	if !errors.Is(err, ErrPrivate) {
		t.Errorf("commit: %v", err)
	}
	if found := sealtest.FilesWith(t, home, canary); found != nil {
		t.Errorf("in the clear in %v", found)
	}
}

// TestPrivateDamaged: sealed files that were changed, truncated, or replaced by
// plain ones are refused.
func TestPrivateDamaged(t *testing.T) {
	home := t.TempDir()
	k := key(t)
	dir := filepath.Join(home, "private")
	_, memory := buildPrivate(t, dir, k, build(t, filepath.Join(home, "plain")))
	sealedLayer := filepath.Join(dir, layersName, memory.Digest.String()+sealedSuffix)
	for _, file := range []string{filepath.Join(dir, stateName), sealedLayer} {
		good, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		changed := bytes.Clone(good)
		changed[len(changed)/2] ^= 1
		for name, bad := range map[string][]byte{
			"changed": changed, "cut off": good[:len(good)-1], "plain": []byte(strings.Repeat(canary, 100)), "empty": nil,
		} {
			if err := errors.Join(os.Remove(file), os.WriteFile(file, bad, 0o400)); err != nil {
				t.Fatal(err)
			}
			s, err := Open(dir, WithKey(k))
			if err == nil {
				if _, openErr := s.OpenLayer(memory); openErr == nil {
					t.Errorf("%s: %s: the layer was opened", file, name)
				}
				err = errors.Join(s.Verify(t.Context()), s.Close())
			}
			if err == nil {
				t.Errorf("%s: %s: it was taken", file, name)
			}
		}
		if err := errors.Join(os.Remove(file), os.WriteFile(file, good, 0o400)); err != nil {
			t.Fatal(err)
		}
	}
	if s, err := Open(dir, WithKey(k)); err != nil {
		t.Error(err)
	} else {
		_ = s.Close()
	}
	wantError(t, second(Make(filepath.Join(home, "odd"), func(b *Builder) (*Snapshot, error) {
		ref, f := layerFile(t, 1, 1)
		m := manifest(ref, ref)
		m.Format = FormatPrivate
		if err := b.AddLayer(ref, f); err != nil {
			return nil, err
		}
		return b.Commit(m, state)
	})), "private")
}

func second[T any](_ T, err error) error { return err }
