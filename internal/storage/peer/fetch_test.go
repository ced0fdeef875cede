package peer

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// TestFetch: a snapshot arrives unchanged. All peers send parts, each part once. Parts of zeros
// are not sent, and take no room.
func TestFetch(t *testing.T) {
	snap := source0(t)
	one, two := peerOf("one", snap), peerOf("two", snap)
	f, err := fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{one, two}})
	if err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
	// Of the memory 2 parts are zeros; the disk and the state have one each.
	if n := one.sent() + two.sent(); n != 8+1+1 {
		t.Errorf("%d parts were sent", n)
	}
	if f.Fetched != 7*PartSize+3*page+4*page+uint64(len(snap.State())) || f.Found != 0 || f.Lent != 0 {
		t.Errorf("%+v", f.Result)
	}
	var st unix.Stat_t
	ref := snap.Manifest().Memory.Layers[0]
	if err := unix.Stat(filepath.Join(f.parent, "snapshot", "layers", ref.Digest.String()), &st); err != nil || st.Blocks*512 > 6*PartSize+16*page {
		t.Errorf("%d bytes on disk, %v", st.Blocks*512, err)
	}
}

// TestOtherPeer: if a peer dies in the middle, another one continues. Parts that have come are
// not sent again.
func TestOtherPeer(t *testing.T) {
	snap := source0(t)
	parts := 0
	dies := &hostile{honest: peerOf("dies", snap)}
	dies.read = func(ctx context.Context, blob layer.Digest, ask []uint32, each func(uint32, []byte) error) error {
		return dies.server.Read(ctx, snap, blob, ask, func(n uint32, content []byte) error {
			dies.mu.Lock()
			parts++
			dead := parts > 4
			dies.mu.Unlock()
			if dead {
				return errors.New("connection reset")
			}
			return each(n, content)
		})
	}
	other := peerOf("other", snap)
	// The other peer comes when the first is dead, and sends the missing parts.
	parent := t.TempDir()
	f, err := fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{dies}})
	var missing *MissingError
	if !errors.As(err, &missing) || missing.Parts == 0 || missing.Of <= missing.Parts || !strings.Contains(err.Error(), "dies: layer") || !strings.Contains(err.Error(), "connection reset") {
		t.Fatalf("%v", err)
	}
	f.wantNone(t)
	f, err = fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{other}})
	if err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
	if f.Found == 0 || other.sent() > 10-3 {
		t.Errorf("%+v, %d parts were sent by the other", f.Result, other.sent())
	}
	// And in one attempt.
	parts = 0
	if f, err = fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{dies, peerOf("other", snap)}}); err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
}

// TestTorn: parts that were half written at a kill are fetched again, and only those. If the
// list of digests is damaged, it is requested again.
func TestTorn(t *testing.T) {
	snap := source0(t)
	ref := snap.Manifest().Memory.Layers[0]
	parent := t.TempDir()
	leave := func(change func(file []byte) []byte) {
		t.Helper()
		dir := filepath.Join(parent, "parts")
		list, err := NewServer(Limits{}).Digests(t.Context(), snap, ref.Digest, 0)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(
			os.RemoveAll(dir), os.RemoveAll(filepath.Join(parent, "snapshot")), os.Mkdir(dir, 0o700),
			os.WriteFile(filepath.Join(dir, ref.Digest.String()), change(memory(1)), 0o600),
			os.WriteFile(filepath.Join(dir, ref.Digest.String()+listSuffix), list.encode(Blob(ref)), 0o600))
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		change func([]byte) []byte
		sent   int
	}{
		"whole":          {func(b []byte) []byte { return b }, 2},
		"a flipped byte": {func(b []byte) []byte { b[3*PartSize]++; return b }, 3},
		"what should be zeros": {func(b []byte) []byte {
			copy(b, "not zeros")
			return b
		}, 2},
		"cut off":  {func(b []byte) []byte { return b[:4*PartSize+5] }, 2 + 6},
		"too long": {func(b []byte) []byte { return append(b, 1, 2, 3) }, 2},
		"garbage":  {func(b []byte) []byte { return bytes.Repeat([]byte{7}, len(b)) }, 10},
	} {
		t.Run(name, func(t *testing.T) {
			leave(c.change)
			p := peerOf("p", snap)
			f, err := fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{p}})
			if err != nil {
				t.Fatal(err)
			}
			f.wantSame(t, snap)
			if p.sent() != c.sent {
				t.Errorf("%d parts were sent, not %d", p.sent(), c.sent)
			}
		})
	}
	leave(func(b []byte) []byte { return b })
	list := filepath.Join(parent, "parts", ref.Digest.String()+listSuffix)
	if err := os.WriteFile(list, []byte(digestsMagic), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{peerOf("p", snap)}})
	if err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
}

// TestLinkedIsNotWrittenTo: the next fetch leaves files alone that are part of a snapshot,
// whatever a peer says of them.
func TestLinkedIsNotWrittenTo(t *testing.T) {
	snap := source0(t)
	f, err := fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{peerOf("p", snap)}})
	if err != nil {
		t.Fatal(err)
	}
	ref := snap.Manifest().Memory.Layers[0]
	if err := os.Remove(filepath.Join(f.parent, "parts", ref.Digest.String()+listSuffix)); err != nil {
		t.Fatal(err)
	}
	liar := &hostile{honest: peerOf("liar", snap)}
	liar.digests = func(d Digests, _ uint32) (Digests, error) { return make(Digests, len(d)), nil }
	if _, _, err := Fetch(t.Context(), snap.Manifest(), filepath.Join(f.parent, "parts"), filepath.Join(f.parent, "again"), Options{Sources: []Source{liar}}); err == nil {
		t.Error("a liar was believed")
	}
	f.wantSame(t, snap)
}

// TestLent: a layer that is here is not sent, unless it is damaged.
func TestLent(t *testing.T) {
	disk := bytes.Repeat([]byte("disk"), page)
	snap, _ := makeSnapshot(t, memory(1), disk)
	_, near := makeSnapshot(t, memory(2), disk)
	ref := snap.Manifest().Disks[0].Stack.Layers[0]
	lend := func(want layer.Ref) *snapshot.Snapshot {
		if want.Digest != ref.Digest {
			return nil
		}
		s, err := snapshot.Open(near)
		if err != nil {
			t.Error(err)
		}
		return s
	}
	if n := Missing(snap.Manifest(), lend); n != uint64(len(memory(1))+len(snap.State())) {
		t.Errorf("%d bytes are missing", n)
	}
	f, err := fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{peerOf("p", snap)}, Lend: lend})
	if err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
	if f.Lent != ref.Size {
		t.Errorf("%+v", f.Result)
	}
	path := filepath.Join(near, "layers", ref.Digest.String())
	if err := errors.Join(os.Remove(path), os.WriteFile(path, make([]byte, ref.Size), 0o400)); err != nil {
		t.Fatal(err)
	}
	if f, err = fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{peerOf("p", snap)}, Lend: lend}); err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
	if f.Lent != 0 {
		t.Errorf("%+v of a damaged one", f.Result)
	}
}

// TestSealed: a snapshot that holds secrets neither leaves a node nor is
// accepted from one.
func TestSealed(t *testing.T) {
	key, err := seal.Generate()
	if err != nil {
		t.Fatal(err)
	}
	snap, _ := makeSnapshot(t, memory(1), memory(2), snapshot.Sealed(key))
	s, blob := NewServer(Limits{}), snap.Manifest().Memory.Layers[0].Digest
	if _, err := s.Digests(t.Context(), snap, blob, 0); !errors.Is(err, ErrSealed) {
		t.Errorf("digests: %v", err)
	}
	err = s.Read(t.Context(), snap, blob, []uint32{0}, func(uint32, []byte) error {
		t.Error("a part was sent")
		return nil
	})
	if !errors.Is(err, ErrSealed) {
		t.Errorf("read: %v", err)
	}
	p := &hostile{honest: peerOf("p", snap)}
	if _, err := fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{p}}); !errors.Is(err, ErrSealed) || p.asked.Load() > 0 {
		t.Errorf("fetch: %v", err)
	}
}

// TestStopped: a fetch ends with its ctx, and the next one finds the parts that have
// come.
func TestStopped(t *testing.T) {
	snap := source0(t)
	ctx, cancel := context.WithCancel(t.Context())
	p := &hostile{honest: peerOf("p", snap)}
	p.read = func(ctx context.Context, blob layer.Digest, ask []uint32, each func(uint32, []byte) error) error {
		if blob == snap.Manifest().Memory.Layers[0].Digest {
			cancel()
			<-ctx.Done()
			return ctx.Err()
		}
		return p.honest.Read(ctx, snap.ID(), blob, ask, each)
	}
	parent := t.TempDir()
	_, _, err := Fetch(ctx, snap.Manifest(), filepath.Join(parent, "parts"), filepath.Join(parent, "snapshot"), Options{Sources: []Source{p}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	(&fetched{parent: parent}).wantNone(t)
	p.read = nil
	f, err := fetchInto(t, parent, snap.Manifest(), Options{Sources: []Source{p}})
	if err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
}

// TestServerRefuses parts that do not exist, and requests of too many parts.
func TestServerRefuses(t *testing.T) {
	snap := source0(t)
	s, blob := NewServer(Limits{}), snap.Manifest().Memory.Layers[0].Digest
	never := func(uint32, []byte) error { return errors.New("sent") }
	for _, err := range []error{
		second(s.Digests(t.Context(), snap, layer.Digest{1}, 0)),
		second(s.Digests(t.Context(), snap, blob, 10)),
		second(s.Digests(t.Context(), snap, blob, 1<<32-1)),
		s.Read(t.Context(), snap, layer.Digest{1}, []uint32{0}, never),
		s.Read(t.Context(), snap, blob, nil, never),
		s.Read(t.Context(), snap, blob, []uint32{2, 10}, never),
		s.Read(t.Context(), snap, blob, make([]uint32, MaxRead+1), never),
	} {
		if !errors.Is(err, ErrAsked) {
			t.Errorf("%v", err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestDamagedHere: a node does not send digests of a layer that is damaged.
func TestDamagedHere(t *testing.T) {
	snap, dir := makeSnapshot(t, memory(1), memory(2))
	ref := snap.Manifest().Memory.Layers[0]
	path := filepath.Join(dir, "layers", ref.Digest.String())
	b := memory(1)
	b[5]++
	if err := errors.Join(os.Remove(path), os.WriteFile(path, b, 0o400)); err != nil {
		t.Fatal(err)
	}
	if _, err := NewServer(Limits{}).Digests(t.Context(), snap, ref.Digest, 0); !errors.Is(err, layer.ErrDamaged) {
		t.Errorf("%v", err)
	}
}

// TestReadsAreBounded: one peer has at most half of the places. A waiting read gets a place
// that becomes free, or is told to ask another node.
func TestReadsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(Limits{Reads: 4})
		enter := func(peer string) func() {
			t.Helper()
			leave, err := s.Enter(t.Context(), peer)
			if err != nil {
				t.Fatal(err)
			}
			return leave
		}
		first := enter("greedy")
		defer enter("greedy")()
		got := make(chan func(), 1)
		go func() { got <- enter("greedy") }()
		synctest.Wait()
		select {
		case <-got:
			t.Error("one peer has more than half")
		default:
		}
		first()
		defer (<-got)()
		defer enter("other")()
		defer enter("third")()
		if _, err := s.Enter(t.Context(), "fourth"); !errors.Is(err, ErrBusy) {
			t.Errorf("a fifth: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.Enter(ctx, "fourth"); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
}

// TestBusyPeer: a peer that serves enough others is asked again later, and does not count as
// failed.
func TestBusyPeer(t *testing.T) {
	snap := source0(t)
	busy := &hostile{honest: peerOf("busy", snap)}
	busy.read = func(context.Context, layer.Digest, []uint32, func(uint32, []byte) error) error { return ErrBusy }
	f, err := fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{busy}})
	var missing *MissingError
	if !errors.As(err, &missing) || !missing.Busy || !strings.Contains(err.Error(), "busy: "+ErrBusy.Error()) {
		t.Errorf("%v", err)
	}
	if f, err = fetchInto(t, f.parent, snap.Manifest(), Options{Sources: []Source{busy, peerOf("free", snap)}}); err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
}

// TestPace: the rate of all bytes to all peers together is bounded.
func TestPace(t *testing.T) {
	snap := source0(t)
	const perSecond = 2 << 20
	blob := snap.Manifest().Memory.Layers[0].Digest
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(Limits{BytesPerSecond: perSecond})
		begin, sent := time.Now(), 0
		var all sync.WaitGroup
		var mu sync.Mutex
		for range 2 {
			all.Go(func() {
				err := s.Read(t.Context(), snap, blob, []uint32{2, 3, 4, 5, 6, 7}, func(_ uint32, content []byte) error {
					mu.Lock()
					defer mu.Unlock()
					sent += len(content)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		least := time.Duration(float64(sent-MaxContent) / perSecond * float64(time.Second))
		if took := time.Since(begin); took < least-time.Millisecond || took > least+time.Second {
			t.Errorf("%d bytes took %v, not %v", sent, took, least)
		}
	})
}
