package peer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/time/rate"
)

// Limits bound the work of a node for others. The zero value has good defaults.
type Limits struct {
	// BytesPerSecond bounds the bytes sent to all peers together; 0 is no
	// bound.
	BytesPerSecond uint64
	// Reads is the greatest number of concurrent reads; 0 is DefaultReads. One peer has
	// at most half of them.
	Reads int
}

// DefaultReads is the default of Limits.Reads.
const DefaultReads = 8

// MinRate is the lowest bound of bytes per second: a part must come in time.
const MinRate = 1 << 20

// readPatience is the time that a read waits for its place.
const readPatience = 10 * time.Second

// keptDigests is the greatest number of digests of parts in memory.
const keptDigests = 64 << 20 / len(layer.Digest{})

var (
	// ErrBusy says that a node serves enough others already.
	ErrBusy = errors.New("the node serves enough peers: ask another one, or later")
	// ErrAsked says that a request is invalid.
	ErrAsked = errors.New("it cannot be asked for")
)

// Server serves snapshots of templates to other nodes.
type Server struct {
	pace  *rate.Limiter // nil is no limit
	reads int
	now   chan struct{} // has an element while a layer is hashed

	mu     sync.Mutex // protects all following fields
	by     map[string]int
	all    int
	freed  chan struct{} // closed when a place becomes free, and made anew
	kept   map[layer.Digest]Digests
	digest int // number of digests in kept
}

// NewServer makes a server.
func NewServer(l Limits) *Server {
	s := &Server{reads: l.Reads, now: make(chan struct{}, 1), by: map[string]int{}, freed: make(chan struct{}), kept: map[layer.Digest]Digests{}}
	if s.reads == 0 {
		s.reads = DefaultReads
	}
	if l.BytesPerSecond > 0 {
		s.pace = rate.NewLimiter(rate.Limit(l.BytesPerSecond), MaxContent)
	}
	return s
}

// Digests returns a page of the digests of a blob's parts.
func (s *Server) Digests(ctx context.Context, snap *snapshot.Snapshot, blob layer.Digest, from uint32) (Digests, error) {
	b, err := find(snap, blob)
	if err != nil {
		return nil, err
	}
	all, err := s.digests(ctx, snap, b)
	if err != nil {
		return nil, err
	}
	if int64(from) >= int64(len(all)) {
		return nil, fmt.Errorf("%w: layer %s has %d parts, there is no part %d", ErrAsked, blob, len(all), from)
	}
	return all[from:min(int(from)+MaxPage, len(all))], nil
}

func find(snap *snapshot.Snapshot, blob layer.Digest) (Blob, error) {
	if err := Travels(snap.Manifest()); err != nil {
		return Blob{}, err
	}
	b, err := blobOf(snap.Manifest(), blob)
	if err != nil {
		return Blob{}, fmt.Errorf("%w: %w", ErrAsked, err)
	}
	return b, nil
}

// digests returns all digests of a blob, and keeps them in memory.
func (s *Server) digests(ctx context.Context, snap *snapshot.Snapshot, b Blob) (Digests, error) {
	if d := s.known(b); d != nil {
		return d, nil
	}
	select { // one at a time: it takes the disk and a processor
	case s.now <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-s.now }()
	if d := s.known(b); d != nil {
		return d, nil
	}
	d, err := compute(ctx, snap, b)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for old, of := range s.kept {
		if s.digest+len(d) <= keptDigests {
			break
		}
		delete(s.kept, old)
		s.digest -= len(of)
	}
	s.kept[b.Digest] = d
	s.digest += len(d)
	return d, nil
}

func (s *Server) known(b Blob) Digests {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kept[b.Digest]
}

// compute hashes each part and the whole blob, so that digests of a damaged layer are
// never sent.
func compute(ctx context.Context, snap *snapshot.Snapshot, b Blob) (Digests, error) {
	in, err := open(snap, b)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }() // only read from
	whole := layer.NewWriter(io.Discard)
	buf := make([]byte, PartSize)
	out := make(Digests, 0, b.Parts())
	for n := range b.Parts() {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		offset, size := b.part(uint32(n))
		if _, err := in.ReadAt(buf[:size], int64(offset)); err != nil {
			return nil, fmt.Errorf("read layer %s: %w", b.Digest, err)
		}
		if _, err := whole.Write(buf[:size]); err != nil {
			return nil, err
		}
		out = append(out, digestOf(buf[:size]))
	}
	if Blob(whole.Ref()) != b {
		return nil, fmt.Errorf("layer %s: %w", b.Digest, layer.ErrDamaged)
	}
	return out, nil
}

// content is an open blob.
type content interface {
	io.ReaderAt
	io.Closer
}

type state struct{ *bytes.Reader }

func (state) Close() error { return nil }

func open(snap *snapshot.Snapshot, b Blob) (content, error) {
	if b == Blob(snap.Manifest().State) {
		return state{bytes.NewReader(snap.State())}, nil
	}
	return snap.OpenLayer(layer.Ref(b))
}

// Read sends parts of a blob, in the order of the request. The receiver detects content that
// was damaged after its digests were computed.
func (s *Server) Read(ctx context.Context, snap *snapshot.Snapshot, blob layer.Digest, parts []uint32, send func(number uint32, content []byte) error) error {
	b, err := find(snap, blob)
	if err != nil {
		return err
	}
	if len(parts) == 0 || len(parts) > MaxRead {
		return fmt.Errorf("%w: %d parts are not 1 to %d", ErrAsked, len(parts), MaxRead)
	}
	for _, n := range parts {
		if int64(n) >= int64(b.Parts()) {
			return fmt.Errorf("%w: layer %s has %d parts, there is no part %d", ErrAsked, blob, b.Parts(), n)
		}
	}
	in, err := open(snap, b)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }() // only read from
	buf := make([]byte, PartSize)
	for _, n := range parts {
		offset, size := b.part(n)
		if _, err := in.ReadAt(buf[:size], int64(offset)); err != nil {
			return fmt.Errorf("read layer %s: %w", b.Digest, err)
		}
		sent, err := pack(buf[:size])
		if err != nil {
			return err
		}
		if s.pace != nil {
			if err := s.pace.WaitN(ctx, len(sent)); err != nil {
				return err
			}
		}
		if err := send(n, sent); err != nil {
			return err
		}
	}
	return nil
}

// Enter waits for a place among the reads that are served, before anything is opened for a
// peer. leave gives the place back.
func (s *Server) Enter(ctx context.Context, peer string) (leave func(), err error) {
	patience := time.NewTimer(readPatience)
	defer patience.Stop()
	for {
		s.mu.Lock()
		if s.all < s.reads && s.by[peer] < max(1, s.reads/2) {
			s.all++
			s.by[peer]++
			s.mu.Unlock()
			return func() { s.leave(peer) }, nil
		}
		freed := s.freed
		s.mu.Unlock()
		select {
		case <-freed:
		case <-patience.C:
			return nil, ErrBusy
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *Server) leave(peer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all--
	if s.by[peer]--; s.by[peer] == 0 {
		delete(s.by, peer)
	}
	close(s.freed)
	s.freed = make(chan struct{})
}
