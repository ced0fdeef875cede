package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// Source is a peer to fetch from. Its methods end with their ctx, and are safe for
// concurrent use. Nothing that it sends is trusted.
type Source interface {
	// Name is for people.
	Name() string
	// Digests returns a page of the digests of a blob's parts, beginning with a
	// part.
	Digests(ctx context.Context, snap snapshot.ID, blob layer.Digest, from uint32) (Digests, error)
	// Read asks for parts, and calls each for every part that comes, one call at a time. It
	// returns the error of each.
	Read(ctx context.Context, snap snapshot.ID, blob layer.Digest, parts []uint32, each func(number uint32, content []byte) error) error
}

// Bounds of a fetch.
const (
	// Stall is the longest silence of a peer that was asked for parts.
	Stall = 20 * time.Second
	// listing is the time that a peer may take for digests, plus a second for each hashed
	// bytes of the layer: the peer may have to hash it first.
	listing = 30 * time.Second
	hashed  = 64 << 20
	// least is the time that a fetch may take, plus a second for each MiB.
	least = 10 * time.Minute
	// workers is the number of concurrent reads from one peer.
	workers = 2
)

// Options say how a snapshot is fetched.
type Options struct {
	// Sources are asked all at once.
	Sources []Source
	// Lend returns a snapshot of this node that has a layer, which then need not be
	// fetched, or nil. Fetch closes the snapshot after use.
	Lend func(layer.Ref) *snapshot.Snapshot
	// Log reports the progress to people; nil reports nothing.
	Log io.Writer
	// Stall is the longest silence of a peer; 0 is the constant.
	Stall time.Duration
	// late is the time after which parts that a peer was asked for are requested from
	// others, too; 0 is a quarter of Stall.
	late time.Duration
	// least is the time that an empty fetch may take; 0 is the constant.
	least time.Duration
}

// ErrLate says that an attempt has taken the longest time allowed. The next attempt finds the
// parts that have come.
var ErrLate = errors.New("an attempt may not take longer")

// Result counts the bytes of a fetch.
type Result struct {
	// Fetched counts the bytes of content that have come, except those whose list of digests
	// proved wrong. Found counts the bytes that an earlier attempt had fetched. Lent counts
	// those of layers that other snapshots of this node have.
	Fetched, Found, Lent uint64
}

// MissingError says which parts no peer has sent.
type MissingError struct {
	Parts, Of, Layers int
	// Why has the fault of each peer. Busy says that a peer refused only because it
	// serves enough others.
	Why  []string
	Busy bool
}

func (e *MissingError) Error() string {
	text := fmt.Sprintf("%d of %d parts of %d layers are missing", e.Parts, e.Of, e.Layers)
	if len(e.Why) == 0 {
		return text + ", and no peer is left to be asked"
	}
	return text + ": " + strings.Join(e.Why, "; ")
}

// Missing is an upper bound of the bytes that a fetch must bring, zeros included: the size of
// all layers that lend does not return.
func Missing(m snapshot.Manifest, lend func(layer.Ref) *snapshot.Snapshot) (bytes uint64) {
	for _, b := range Blobs(m) {
		if lent := lendOf(lend, m, b); lent != nil {
			_ = lent.Close() // only looked at
			continue
		}
		bytes += b.Size
	}
	return bytes
}

func lendOf(lend func(layer.Ref) *snapshot.Snapshot, m snapshot.Manifest, b Blob) *snapshot.Snapshot {
	if lend == nil || b == Blob(m.State) {
		return nil
	}
	return lend(layer.Ref(b))
}

// Fetch makes a snapshot at dir from parts that peers have. The parts are kept in the
// folder parts, whose parent exists, where the next attempt finds them. The caller removes
// the folder.
func Fetch(ctx context.Context, m snapshot.Manifest, parts, dir string, o Options) (*snapshot.Snapshot, Result, error) {
	f, err := newFetch(m, parts, o)
	if err != nil {
		return nil, Result{}, fmt.Errorf("fetch snapshot: %w", err)
	}
	var size uint64
	for _, b := range f.blobs {
		size += b.Size
	}
	defer f.giveBackLent()
	most := f.least + time.Duration(size/PartSize)*time.Second
	ctx, cancel := context.WithTimeoutCause(ctx, most, ErrLate)
	defer cancel()
	snap, err := f.all(ctx, dir)
	if err != nil && errors.Is(context.Cause(ctx), ErrLate) {
		err = fmt.Errorf("%w: %v: %w", ErrLate, most, err)
	}
	if err != nil {
		err = fmt.Errorf("fetch snapshot %s: %w", f.id, err)
	}
	return snap, f.result, err
}

// fetch is one attempt.
type fetch struct {
	Options
	id       snapshot.ID
	manifest snapshot.Manifest
	blobs    []Blob
	dir      string
	sources  []*source
	lent     map[layer.Digest]*snapshot.Snapshot // the lender of each layer that is intact here
	lenders  []*snapshot.Snapshot                // open until the end
	told     map[layer.Digest]told               // the digests of parts of blobs

	mu      sync.Mutex // protects all following fields
	result  Result
	counted map[layer.Digest]uint64 // the share of each blob in result.Fetched
}

// source is a peer, with the reason why it is not asked any more.
type source struct {
	Source
	mu   sync.Mutex // protects all following fields
	left error      // nil while it is asked
	// busy is the reason why it was not asked for more, although it has no
	// fault.
	busy error
	// byDigests says that left is about a part that does not match its digest: the list of
	// digests may be wrong, too.
	byDigests bool
}

func (s *source) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left
}

func (s *source) leave(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left == nil {
		s.left, s.byDigests = err, errors.Is(err, ErrPart)
	}
}

// serving notes that a peer serves enough others.
func (s *source) serving(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy = err
}

// reason says why a peer has not sent all parts.
func (s *source) reason() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left != nil {
		return s.left
	}
	return s.busy
}

// blame excludes a peer for good.
func (s *source) blame(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left, s.byDigests = err, false
}

// forgive readmits a peer that was excluded because of a list of digests.
func (s *source) forgive() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byDigests {
		s.left, s.byDigests = nil, false
	}
}

func newFetch(m snapshot.Manifest, dir string, o Options) (*fetch, error) {
	if err := Travels(m); err != nil {
		return nil, err
	}
	id, err := IDOf(m)
	if err != nil {
		return nil, err
	}
	f := &fetch{Options: o, id: id, manifest: m, blobs: Blobs(m), dir: dir,
		lent: map[layer.Digest]*snapshot.Snapshot{}, told: map[layer.Digest]told{}, counted: map[layer.Digest]uint64{}}
	for _, b := range f.blobs {
		if err := b.check(); err != nil {
			return nil, err
		}
	}
	for _, s := range o.Sources {
		f.sources = append(f.sources, &source{Source: s})
	}
	if f.Log == nil {
		f.Log = io.Discard
	}
	if f.Stall == 0 {
		f.Stall = Stall
	}
	if f.late == 0 {
		f.late = f.Stall / 4
	}
	if f.least == 0 {
		f.least = least
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return f, nil
}

// say writes a line for people.
func (f *fetch) say(format string, args ...any) {
	_, _ = fmt.Fprintf(f.Log, "== "+format+"\n", args...)
}

// all fetches all blobs and makes the snapshot. It fetches a blob again if its list of
// digests was wrong, with the list of another peer: each time it excludes one more peer. It
// also does so if the snapshot that lent a layer was removed since, unless another snapshot
// lends the layer.
func (f *fetch) all(ctx context.Context, dir string) (*snapshot.Snapshot, error) {
	for {
		for i, b := range f.blobs {
			if err := f.blob(ctx, b); err != nil {
				return nil, f.missing(ctx, i, err)
			}
		}
		snap, err := f.commit(dir)
		var gone *goneError
		if errors.As(err, &gone) {
			f.forgetLent(gone.ref)
			continue
		}
		var bad *damagedError
		if !errors.As(err, &bad) {
			return snap, err
		}
		if err := f.distrust(bad.blob, "its digests of parts are not those of the layer"); err != nil {
			return nil, err
		}
	}
}

// missing completes a MissingError at the end of an attempt: it adds the missing parts of the
// later blobs, and the fault of each peer. The file of every blob before number done is
// complete.
func (f *fetch) missing(ctx context.Context, done int, err error) error {
	var m *MissingError
	if ctx.Err() != nil || !errors.As(err, &m) {
		return err
	}
	for _, b := range f.blobs[done+1:] {
		if lent := lendOf(f.Lend, f.manifest, b); lent != nil {
			_ = lent.Close() // only looked at
			continue
		}
		m.Parts, m.Of, m.Layers = m.Parts+b.Parts(), m.Of+b.Parts(), m.Layers+1
	}
	for _, s := range f.sources {
		if why := s.reason(); why != nil {
			m.Why = append(m.Why, s.Name()+": "+why.Error())
			m.Busy = m.Busy || errors.Is(why, ErrBusy)
		}
	}
	return m
}

// damagedError is a blob that is complete but does not match its digest.
type damagedError struct{ blob Blob }

func (e *damagedError) Error() string {
	return fmt.Sprintf("layer %s: %v", e.blob.Digest, layer.ErrDamaged)
}

// commit makes the snapshot from the files that have come. It hashes each
// layer.
func (f *fetch) commit(dir string) (*snapshot.Snapshot, error) {
	state, err := os.ReadFile(f.file(f.blobs[0]))
	if err != nil {
		return nil, err
	}
	if digestOfState(state) != f.blobs[0].Digest {
		return nil, &damagedError{f.blobs[0]}
	}
	snap, err := snapshot.Make(dir, func(b *snapshot.Builder) (*snapshot.Snapshot, error) {
		for _, ref := range f.manifest.Layers() {
			if from := f.lent[ref.Digest]; from != nil {
				if err := link(b, ref, from); err != nil {
					return nil, err
				}
				continue
			}
			err := b.LinkFile(ref, f.file(Blob(ref)))
			if errors.Is(err, layer.ErrDamaged) {
				return nil, &damagedError{Blob(ref)}
			}
			if err != nil {
				return nil, err
			}
		}
		return b.Commit(f.manifest, state)
	})
	if err == nil && snap.ID() != f.id {
		err = errors.Join(fmt.Errorf("it became snapshot %s", snap.ID()), snap.Close(), snapshot.Remove(dir))
	}
	if err != nil {
		return nil, err
	}
	return snap, nil
}

// goneError is a layer that its lender no longer has: its template was deleted, for example.
type goneError struct {
	ref layer.Ref
	err error
}

func (e *goneError) Error() string { return fmt.Sprintf("layer %s was lent: %v", e.ref.Digest, e.err) }

// link shares a layer with the snapshot that lends it.
func link(b *snapshot.Builder, ref layer.Ref, from *snapshot.Snapshot) error {
	err := b.LinkLayer(ref, from)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, layer.ErrDamaged) {
		return &goneError{ref, err}
	}
	return err
}

// borrow reports whether an intact layer is in another snapshot of this node. That snapshot
// stays open, so that the layer linked at the end is the one that was hashed.
func (f *fetch) borrow(ctx context.Context, b Blob) bool {
	if f.lent[b.Digest] != nil {
		return true
	}
	if b == Blob(f.manifest.State) {
		return false
	}
	for _, from := range f.lenders {
		if slices.Contains(from.Manifest().Layers(), layer.Ref(b)) && f.borrowFrom(ctx, b, from) {
			return true
		}
	}
	from := lendOf(f.Lend, f.manifest, b)
	if from == nil {
		return false
	}
	if f.borrowFrom(ctx, b, from) {
		f.lenders = append(f.lenders, from)
		return true
	}
	_ = from.Close() // only read from
	return false
}

// borrowFrom takes a layer of a snapshot, if it is there and intact. Otherwise the layer
// is fetched.
func (f *fetch) borrowFrom(ctx context.Context, b Blob, from *snapshot.Snapshot) bool {
	in, err := from.OpenLayer(layer.Ref(b))
	if err != nil {
		return false
	}
	defer func() { _ = in.Close() }() // only read from
	if layer.Copy(ctx, io.Discard, in, layer.Ref(b)) != nil {
		return false
	}
	f.lent[b.Digest] = from
	f.mu.Lock()
	f.result.Lent += b.Size
	f.mu.Unlock()
	f.say("layer %.12s is here", b.Digest)
	return true
}

// forgetLent notes that a lent layer is not here any more.
func (f *fetch) forgetLent(ref layer.Ref) {
	delete(f.lent, ref.Digest)
	f.mu.Lock()
	f.result.Lent -= ref.Size
	f.mu.Unlock()
	f.say("layer %.12s is not here any more", ref.Digest)
}

// giveBackLent closes the snapshots that have lent layers.
func (f *fetch) giveBackLent() {
	for _, from := range f.lenders {
		_ = from.Close() // only read from
	}
}

func (f *fetch) file(b Blob) string { return filepath.Join(f.dir, b.Digest.String()) }

// asked returns the peers that are still asked.
func (f *fetch) asked() (out []*source) {
	for _, s := range f.sources {
		if s.why() == nil {
			out = append(out, s)
		}
	}
	return out
}

// IDOf is the id of the snapshot that a manifest describes.
func IDOf(m snapshot.Manifest) (snapshot.ID, error) {
	b, err := m.Encode()
	if err != nil {
		return snapshot.ID{}, err
	}
	return snapshot.ID(digestOfState(b)), nil
}

// sorted returns the numbers in order.
func sorted(parts map[uint32]bool) []uint32 {
	out := make([]uint32, 0, len(parts))
	for n := range parts {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}
