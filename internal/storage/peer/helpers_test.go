package peer

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

const page = layer.PageSize

// memory has a part that is all zeros, a part with a few pages, incompressible parts, and a
// short last part.
func memory(seed uint64) []byte {
	b := make([]byte, 9*PartSize+3*page)
	x := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = x.Read(b[2*PartSize : 8*PartSize]) // it never fails
	_, _ = x.Read(b[8*PartSize+4*page : 8*PartSize+6*page])
	copy(b[9*PartSize:], bytes.Repeat([]byte("page"), 100))
	return b
}

func whole(r layer.Ref) snapshot.Stack {
	return snapshot.StackOf(layer.Stack{Size: r.Size, Layers: []layer.Ref{r}, Extents: []layer.Extent{{Length: r.Size}}})
}

// makeSnapshot makes a snapshot of a memory and a disk, and returns its folder.
func makeSnapshot(t testing.TB, memory, disk []byte, o ...snapshot.Option) (*snapshot.Snapshot, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "snapshot")
	snap, err := snapshot.Make(dir, func(b *snapshot.Builder) (*snapshot.Snapshot, error) {
		m, err := b.StreamLayer(t.Context(), bytes.NewReader(memory), 1<<40)
		d, diskErr := b.StreamLayer(t.Context(), bytes.NewReader(disk), 1<<40)
		if err := errors.Join(err, diskErr); err != nil {
			return nil, err
		}
		return b.Commit(snapshot.Manifest{
			Created: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), Kernel: strings.Repeat("ab", 32),
			CPU: snapshot.CPU{Profile: "host-v1", Vendor: "AuthenticAMD", Family: 23, Model: 1}, TSCKHz: 2_400_000,
			VCPUs: 1, Memory: whole(m), Disks: []snapshot.Disk{{ID: "root", ReadOnly: true, Stack: whole(d)}},
		}, []byte("processors and devices"))
	}, o...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() }) // only read from
	return snap, dir
}

func source0(t testing.TB) *snapshot.Snapshot {
	snap, _ := makeSnapshot(t, memory(1), bytes.Repeat([]byte("disk"), page))
	return snap
}

// honest is a peer that has a snapshot.
type honest struct {
	name   string
	server *Server
	snap   *snapshot.Snapshot

	mu    sync.Mutex // protects parts
	parts map[uint32]int
}

func peerOf(name string, snap *snapshot.Snapshot) *honest {
	return &honest{name: name, server: NewServer(Limits{}), snap: snap, parts: map[uint32]int{}}
}

func (h *honest) Name() string { return h.name }

func (h *honest) Digests(ctx context.Context, id snapshot.ID, blob layer.Digest, from uint32) (Digests, error) {
	if id != h.snap.ID() {
		return nil, errors.New("no such snapshot here")
	}
	leave, err := h.server.Enter(ctx, "test")
	if err != nil {
		return nil, err
	}
	defer leave()
	return h.server.Digests(ctx, h.snap, blob, from)
}

func (h *honest) Read(ctx context.Context, id snapshot.ID, blob layer.Digest, parts []uint32, each func(uint32, []byte) error) error {
	leave, err := h.server.Enter(ctx, "test")
	if err != nil {
		return err
	}
	defer leave()
	return h.server.Read(ctx, h.snap, blob, parts, func(n uint32, content []byte) error {
		h.mu.Lock()
		h.parts[n]++
		h.mu.Unlock()
		return each(n, content)
	})
}

func (h *honest) sent() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, times := range h.parts {
		n += times
	}
	return n
}

// hostile is a peer that misbehaves according to its fields, and is honest
// otherwise.
type hostile struct {
	*honest
	digests func(Digests, uint32) (Digests, error)
	read    func(ctx context.Context, blob layer.Digest, parts []uint32, each func(uint32, []byte) error) error
	asked   atomic.Int64
}

func (h *hostile) Digests(ctx context.Context, id snapshot.ID, blob layer.Digest, from uint32) (Digests, error) {
	list, err := h.honest.Digests(ctx, id, blob, from)
	if h.digests != nil && err == nil {
		return h.digests(list, from)
	}
	return list, err
}

func (h *hostile) Read(ctx context.Context, id snapshot.ID, blob layer.Digest, parts []uint32, each func(uint32, []byte) error) error {
	h.asked.Add(1)
	if h.read != nil {
		return h.read(ctx, blob, parts, each)
	}
	return h.honest.Read(ctx, id, blob, parts, each)
}

// fetched fetches a snapshot into a new folder.
type fetched struct {
	parent string
	snap   *snapshot.Snapshot
	Result
	log bytes.Buffer
}

// fetchInto fetches with the parts that an earlier attempt has left in parent.
func fetchInto(t testing.TB, parent string, m snapshot.Manifest, o Options) (*fetched, error) {
	t.Helper()
	f := &fetched{parent: parent}
	o.Log = &f.log
	if o.Stall == 0 {
		o.Stall = time.Minute
	}
	var err error
	f.snap, f.Result, err = Fetch(t.Context(), m, filepath.Join(parent, "parts"), filepath.Join(parent, "snapshot"), o)
	if f.snap != nil {
		t.Cleanup(func() { _ = f.snap.Close() }) // only read from
	}
	return f, err
}

// wantSame compares a snapshot with its source.
func (f *fetched) wantSame(t testing.TB, of *snapshot.Snapshot) {
	t.Helper()
	if f.snap.ID() != of.ID() || !bytes.Equal(f.snap.State(), of.State()) {
		t.Errorf("snapshot %s has become %s", of.ID(), f.snap.ID())
	}
	if err := f.snap.Verify(t.Context()); err != nil {
		t.Error(err)
	}
}

// wantNone checks that no snapshot was made.
func (f *fetched) wantNone(t testing.TB) {
	t.Helper()
	entries, err := os.ReadDir(f.parent)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "parts" {
			t.Errorf("%s is there", e.Name())
		}
	}
}
