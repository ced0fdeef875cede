package peer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/layer"
	"golang.org/x/sys/unix"
)

// listSuffix is the suffix of the file with the digests of a blob's parts.
const listSuffix = ".parts"

func digestOfState(b []byte) layer.Digest { return sha256.Sum256(b) }

// blob ensures that all parts of a blob are in its file. commit checks later whether the whole
// matches the blob's digest.
func (f *fetch) blob(ctx context.Context, b Blob) error {
	if f.borrow(ctx, b) {
		return nil
	}
	for {
		list, err := f.list(ctx, b)
		if err != nil {
			return err
		}
		missing, err := f.fill(ctx, b, list)
		if err != nil || len(missing) == 0 {
			return err
		}
		// No peer is left. If the list is wrong, honest peers were excluded because
		// of it.
		honest := false
		for _, s := range f.sources {
			s.mu.Lock()
			honest = honest || s.byDigests && s != f.told[b.Digest].by
			s.mu.Unlock()
		}
		if !honest {
			return &MissingError{Parts: len(missing), Of: b.Parts(), Layers: 1}
		}
		if err := f.distrust(b, "nobody has parts with the digests that it has told"); err != nil {
			return err
		}
	}
}

// told is the digests of a blob's parts, with their source.
type told struct {
	list Digests
	by   *source // nil: an earlier attempt
}

// list returns the digests of a blob's parts: those of an earlier attempt, or of any
// peer.
func (f *fetch) list(ctx context.Context, b Blob) (Digests, error) {
	if t, ok := f.told[b.Digest]; ok {
		return t.list, nil
	}
	path := f.file(b) + listSuffix
	if file, err := os.ReadFile(path); err == nil {
		if list, err := parseDigests(file, b); err == nil {
			f.told[b.Digest] = told{list: list}
			return list, nil
		}
	}
	for _, s := range f.asked() {
		list, err := f.ask(ctx, s, b)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			f.say("%s does not tell the parts of layer %.12s: %v", s.Name(), b.Digest, err)
			s.blame(err)
			continue
		}
		if err := durable.WriteFile(path, list.encode(b), 0o600); err != nil {
			return nil, err
		}
		f.told[b.Digest] = told{list, s}
		return list, nil
	}
	return nil, &MissingError{Parts: b.Parts(), Of: b.Parts(), Layers: 1}
}

// ask asks a peer for digests.
func (f *fetch) ask(ctx context.Context, s *source, b Blob) (Digests, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, max(listing, f.Stall)+time.Duration(b.Size/hashed)*time.Second, errors.New("it takes too long to tell the digests of parts"))
	defer cancel()
	list := make(Digests, 0, b.Parts())
	for len(list) < b.Parts() {
		page, err := s.Digests(ctx, f.id, b.Digest, uint32(len(list)))
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			return nil, err
		}
		if len(page) == 0 || len(page) > b.Parts()-len(list) {
			return nil, fmt.Errorf("it tells %d digests where %d are left", len(page), b.Parts()-len(list))
		}
		list = append(list, page...)
	}
	return list, nil
}

// distrust forgets the digests of a blob's parts, and excludes the peer that sent them. It
// readmits the peers that were excluded because of a list of digests.
func (f *fetch) distrust(b Blob, why string) error {
	by := f.told[b.Digest].by
	delete(f.told, b.Digest)
	if err := os.Remove(f.file(b) + listSuffix); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f.mu.Lock() // parts that cannot be used are no progress
	f.result.Fetched -= f.counted[b.Digest]
	delete(f.counted, b.Digest)
	f.mu.Unlock()
	if by != nil {
		f.say("%s is left out: %s (%.12s)", by.Name(), why, b.Digest)
		by.blame(errors.New(why))
	}
	for _, s := range f.sources {
		s.forgive()
	}
	return nil
}

// fill fetches the parts in a list that a file lacks, and returns those that are
// missing afterwards.
func (f *fetch) fill(ctx context.Context, b Blob, list Digests) (missing map[uint32]bool, err error) {
	file, fresh, err := openFile(f.file(b), int64(b.Size))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	w := &fill{fetch: f, blob: b, list: list, file: file, sparse: fresh, missing: map[uint32]bool{}}
	if err := w.look(ctx, fresh); err != nil {
		return nil, err
	}
	if len(w.missing) > 0 {
		f.say("fetch %d of %d parts of layer %.12s", len(w.missing), b.Parts(), b.Digest)
	}
	w.run(ctx)
	if w.failed != nil {
		return nil, w.failed
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(w.missing) > 0 {
		return w.missing, nil
	}
	return nil, file.Chmod(0o400) // the code that links it checks the mode
}

// run asks all peers for parts, until all parts have come or no peer is left.
func (w *fill) run(ctx context.Context) {
	ctx, w.end = context.WithCancel(ctx)
	defer w.end()
	if len(w.missing) == 0 {
		return
	}
	var all sync.WaitGroup
	for _, s := range w.asked() {
		for range workers {
			all.Go(func() { w.work(ctx, s) })
		}
	}
	idle := make(chan struct{})
	go func() {
		all.Wait()
		close(idle)
	}()
	tick := time.NewTicker(w.Options.late/4 + time.Millisecond) // by now, parts that others were asked for may be late
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			w.wake()
		case <-idle:
			return
		}
	}
}

// openFile opens a file of a size. Its unwritten ranges are zeros.
func openFile(path string, size int64) (f *os.File, fresh bool, err error) {
	// A file that a snapshot has linked is never written to again, whatever a list
	// says.
	var st unix.Stat_t
	if unix.Lstat(path, &st) == nil && (st.Nlink > 1 || st.Mode&unix.S_IFMT != unix.S_IFREG) {
		if err := os.Remove(path); err != nil {
			return nil, false, err
		}
	}
	f, err = os.OpenFile(path, os.O_RDWR, 0) // root may write to read-only files
	if errors.Is(err, os.ErrPermission) {
		if err = os.Chmod(path, 0o600); err == nil {
			f, err = os.OpenFile(path, os.O_RDWR, 0)
		}
	}
	if errors.Is(err, os.ErrNotExist) {
		fresh = true
		f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return nil, false, err
	}
	if err := f.Truncate(size); err != nil {
		return nil, false, errors.Join(err, f.Close())
	}
	return f, fresh, nil
}

// fill is the work on one blob.
type fill struct {
	*fetch
	blob   Blob
	list   Digests
	file   *os.File
	sparse bool // missing parts are holes in the file
	end    context.CancelFunc

	mu      sync.Mutex          // protects all following fields
	missing map[uint32]bool     // parts, including those that a peer was asked for
	under   map[uint32]underway // the latest request of each part
	free    []uint32            // parts that no peer was asked for, in order
	failed  error               // an error of the disk
	idle    *sync.Cond          // of mu: free or missing has changed
}

// underway is the peer that was asked for a part, and the time of the request.
type underway struct {
	by    *source
	since time.Time
}

// look finds the parts that are in the file already.
func (w *fill) look(ctx context.Context, fresh bool) error {
	w.idle, w.under = sync.NewCond(&w.mu), map[uint32]underway{}
	buf := make([]byte, PartSize)
	for n, want := range w.list {
		if err := ctx.Err(); err != nil {
			return err
		}
		if fresh && want != (layer.Digest{}) {
			w.missing[uint32(n)] = true
			continue
		}
		if fresh {
			continue
		}
		offset, size := w.blob.part(uint32(n))
		if _, err := w.file.ReadAt(buf[:size], int64(offset)); err != nil {
			return err
		}
		switch got := digestOf(buf[:size]); {
		case got == want && want != (layer.Digest{}):
			w.result.Found += size
		case got == want:
		case want == (layer.Digest{}):
			if err := unix.Fallocate(int(w.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(offset), int64(size)); err != nil {
				return fmt.Errorf("make a hole: %w", err)
			}
		default:
			w.missing[uint32(n)] = true
		}
	}
	w.free = sorted(w.missing)
	return nil
}

// take returns parts to ask for; it returns no parts when nothing is left to
// do.
func (w *fill) take(ctx context.Context, s *source) []uint32 {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		if w.failed != nil || ctx.Err() != nil || len(w.missing) == 0 || s.why() != nil {
			return nil
		}
		var mine []uint32
		if len(w.free) == 0 {
			mine = w.overdue(s)
		} else {
			// Not all that are left, so that other workers get parts, too.
			n := min(MaxRead, max(1, len(w.free)/(2*workers)), len(w.free))
			mine = w.free[:n:n]
			w.free = w.free[n:]
		}
		if len(mine) > 0 {
			for _, n := range mine {
				w.under[n] = underway{s, time.Now()}
			}
			return mine
		}
		w.idle.Wait() // the peer that was asked for them may fail
	}
}

// overdue returns parts that another peer was asked for some time ago, so that a slow peer does
// not hold up idle ones. The caller holds w.mu.
func (w *fill) overdue(s *source) (parts []uint32) {
	for n := range w.missing {
		if u, asked := w.under[n]; asked && u.by != s && time.Since(u.since) > w.Options.late && len(parts) < MaxRead {
			parts = append(parts, n)
		}
	}
	slices.Sort(parts)
	return parts
}

// work asks a peer for parts until nothing is left to do, or the peer is excluded.
func (w *fill) work(ctx context.Context, s *source) {
	defer context.AfterFunc(ctx, w.wake)()
	for ctx.Err() == nil {
		parts := w.take(ctx, s)
		if len(parts) == 0 {
			return
		}
		left, err := w.read(ctx, s, parts)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("it has sent %d of %d parts that it was asked for", len(parts)-len(left), len(parts))
		}
		if errors.Is(err, ErrBusy) { // its other worker may have a place
			s.serving(err)
			w.giveBack(s, left)
			return
		}
		if err != nil && ctx.Err() == nil && w.broken() == nil {
			s.leave(fmt.Errorf("layer %.12s: %w", w.blob.Digest, err))
			w.say("%s is left out: %v", s.Name(), err)
		}
		w.giveBack(s, left)
	}
}

// giveBack allows other peers to be asked for parts that a peer has not sent.
func (w *fill) giveBack(s *source, left map[uint32]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range sorted(left) {
		if w.missing[n] && w.under[n].by == s {
			delete(w.under, n)
			w.free = append(w.free, n)
		}
	}
	w.idle.Broadcast()
}

func (w *fill) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.idle.Broadcast()
}

func (w *fill) broken() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failed
}

// read asks a peer for parts once, and returns those that have not come.
func (w *fill) read(ctx context.Context, s *source, parts []uint32) (left map[uint32]bool, err error) {
	stalled := fmt.Errorf("nothing has come for %v", w.Stall)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(w.Stall, func() { cancel(stalled) })
	defer timer.Stop()
	left = make(map[uint32]bool, len(parts))
	for _, n := range parts {
		left[n] = true
	}
	buf := make([]byte, PartSize)
	err = s.Read(ctx, w.id, w.blob.Digest, parts, func(n uint32, sent []byte) error {
		if !left[n] {
			return fmt.Errorf("it sends part %d, for which it was not asked", n)
		}
		offset, size := w.blob.part(n)
		content, err := unpack(sent, size, w.list[n], buf)
		if err != nil {
			return fmt.Errorf("part %d: %w", n, err)
		}
		if err := w.write(content, int64(offset)); err != nil {
			w.mu.Lock()
			w.failed = errors.Join(w.failed, err)
			w.mu.Unlock()
			return err
		}
		delete(left, n)
		w.came(n, size)
		timer.Reset(w.Stall)
		return nil
	})
	if cause := context.Cause(ctx); len(left) > 0 && errors.Is(cause, stalled) {
		err = cause
	}
	return left, err
}

// came notes that a part is in the file.
func (w *fill) came(n uint32, size uint64) {
	w.mu.Lock()
	first := w.missing[n] // another peer may have sent it, too
	delete(w.missing, n)
	done := len(w.missing) == 0
	w.mu.Unlock()
	if first {
		w.fetch.mu.Lock()
		w.result.Fetched += size
		w.fetch.counted[w.blob.Digest] += size
		w.fetch.mu.Unlock()
	}
	if done {
		w.end() // ends reads of parts that another peer has sent
	}
}

// write writes a part. In a sparse file, pages of zeros remain holes.
func (w *fill) write(content []byte, at int64) error {
	if !w.sparse {
		_, err := w.file.WriteAt(content, at)
		return err
	}
	for len(content) > 0 {
		zero, n := run(content)
		if !zero {
			if _, err := w.file.WriteAt(content[:n], at); err != nil {
				return err
			}
		}
		content, at = content[n:], at+int64(n)
	}
	return nil
}

// run returns the length of the first pages that are alike: either all zeros,
// or all with content.
func run(b []byte) (zero bool, n int) {
	for n < len(b) {
		page := b[n:min(n+layer.PageSize, len(b))]
		is := bytes.Equal(page, zeros[:len(page)])
		if n > 0 && is != zero {
			break
		}
		zero, n = is, n+len(page)
	}
	return zero, n
}
