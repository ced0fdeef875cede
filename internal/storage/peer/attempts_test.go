package peer

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// TestLenderGoes: a snapshot that lends a layer may be removed while the rest is fetched.
// Then the layer is fetched, and only hashed layers are linked.
func TestLenderGoes(t *testing.T) {
	snap, _ := makeSnapshot(t, memory(1), bytes.Repeat([]byte("disk"), page))
	ref := snap.Manifest().Memory.Layers[0]
	for name, next := range map[string]bool{"nobody else": false, "one that is damaged": true} {
		t.Run(name, func(t *testing.T) {
			_, near := makeSnapshot(t, memory(1), memory(2))
			_, damaged := makeSnapshot(t, memory(1), memory(3))
			path := filepath.Join(damaged, "layers", ref.Digest.String())
			if err := errors.Join(os.Remove(path), os.WriteFile(path, make([]byte, ref.Size), 0o400)); err != nil {
				t.Fatal(err)
			}
			lend := func(want layer.Ref) *snapshot.Snapshot {
				if want != layer.Ref(ref) {
					return nil
				}
				if s, err := snapshot.Open(near); err == nil {
					return s
				}
				if s, err := snapshot.Open(damaged); err == nil && next {
					return s
				}
				return nil
			}
			p := &hostile{honest: peerOf("p", snap)}
			removed := false
			p.read = func(ctx context.Context, blob layer.Digest, ask []uint32, each func(uint32, []byte) error) error {
				if blob == snap.Manifest().Disks[0].Stack.Layers[0].Digest && !removed {
					removed = true // its memory was borrowed by now
					if err := snapshot.Remove(near); err != nil {
						t.Error(err)
					}
				}
				return p.honest.Read(ctx, snap.ID(), blob, ask, each)
			}
			f, err := fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{p}, Lend: lend})
			if err != nil {
				t.Fatalf("%v\n%s", err, &f.log)
			}
			f.wantSame(t, snap)
			if !removed || f.Lent != 0 {
				t.Errorf("removed: %v, %+v", removed, f.Result)
			}
		})
	}
}

// TestLiesAreNoProgress: parts that come with wrong digests do not count. Otherwise a lying
// peer would be asked for ever.
func TestLiesAreNoProgress(t *testing.T) {
	snap := source0(t)
	var lie []byte // another one for each attempt
	ref := snap.Manifest().Memory.Layers[0]
	liar := &hostile{honest: peerOf("liar", snap)}
	liar.digests = func(d Digests, _ uint32) (Digests, error) {
		if len(d) < Blob(ref).Parts() {
			return d, nil // of another layer
		}
		out := append(Digests(nil), d...)
		out[1] = digestOf(lie)
		return out, nil
	}
	liar.read = func(ctx context.Context, blob layer.Digest, ask []uint32, each func(uint32, []byte) error) error {
		return liar.honest.Read(ctx, snap.ID(), blob, ask, func(n uint32, content []byte) error {
			var err error
			if blob == ref.Digest && n == 1 {
				content, err = pack(lie)
			}
			return errors.Join(err, each(n, content))
		})
	}
	parent := t.TempDir()
	for attempt := range 3 {
		lie = bytes.Repeat([]byte{byte(attempt + 1)}, PartSize)
		f, err := fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{liar}})
		var missing *MissingError
		if !errors.As(err, &missing) {
			t.Fatalf("%v", err)
		}
		if attempt > 0 && f.Fetched > 0 {
			t.Errorf("attempt %d: %+v", attempt, f.Result)
		}
	}
	f, err := fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{liar, peerOf("honest", snap)}})
	if err != nil {
		t.Fatalf("%v\n%s", err, &f.log)
	}
	f.wantSame(t, snap)
}

// TestLate: an attempt that has taken the longest time allowed says so, and the next one
// continues.
func TestLate(t *testing.T) {
	snap := source0(t)
	slow := &hostile{honest: peerOf("slow", snap)}
	slow.read = func(ctx context.Context, blob layer.Digest, ask []uint32, each func(uint32, []byte) error) error {
		if blob == snap.Manifest().Memory.Layers[0].Digest {
			if err := slow.honest.Read(ctx, snap.ID(), blob, ask[:1], each); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		}
		return slow.honest.Read(ctx, snap.ID(), blob, ask, each)
	}
	parent := t.TempDir()
	// 9 s for 9 MiB are taken back: only the test's own second is left.
	f, err := fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{slow}, least: time.Second - 9*time.Second})
	if !errors.Is(err, ErrLate) || f.Fetched == 0 {
		t.Fatalf("%v, %+v", err, f.Result)
	}
	slow.read = nil
	if f, err = fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{slow}}); err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
	if f.Found == 0 {
		t.Errorf("%+v", f.Result)
	}
}
