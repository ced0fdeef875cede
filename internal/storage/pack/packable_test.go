package pack

import (
	"bytes"
	"errors"
	"testing"

	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// private is a snapshot of a machine that held secrets.
func private(t *testing.T) *snapshot.Snapshot {
	key, err := seal.Generate()
	if err != nil {
		t.Fatal(err)
	}
	return makeWith(t, []snapshot.Option{snapshot.Sealed(key)}, content{size: page, pages: []uint64{0}}, content{size: page, pages: []uint64{0}, seed: 7})
}

// TestPackable: a private snapshot is not packed, and a pack of one is refused.
func TestPackable(t *testing.T) {
	snap := private(t)
	if err := Packable(snap.Manifest()); !errors.Is(err, ErrPrivate) {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if _, err := Write(t.Context(), &out, snap, PackOptions{}); !errors.Is(err, ErrPrivate) || out.Len() > 0 {
		t.Errorf("packed: %v, %d bytes", err, out.Len())
	}
	r := newRegistry(t)
	_, err := Push(t.Context(), snap, r.ref(t, "a:1"), r.registries(), PackOptions{})
	if n := r.count("POST blob"); !errors.Is(err, ErrPrivate) || n > 0 {
		t.Errorf("pushed: %v, %d blobs", err, n)
	}
	// A pack of a private snapshot, which somebody else has made regardless.
	b := open(t, packed(t, small(t), PackOptions{}))
	config, err := snap.Manifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	b.manifest(func(m *v1.Manifest) { b.replace(&m.Config, config) })
	_, parent, err := unpackInto(t, b.bytes(), UnpackOptions{})
	wantRefused(t, parent, err, ErrPrivate.Error())
}
