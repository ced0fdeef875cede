package pack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
)

// window is how much history our compressor uses; maxWindow is the most that our
// decompressor allows in packs of others.
const (
	window    = 4 << 20
	maxWindow = 8 << 20
)

// workers is how many parts are in memory at a time.
const workers = 4

// raw is a range of a layer, or the state, from which a part will be made.
type raw struct {
	state  bool
	layer  layer.Digest
	offset uint64
	size   uint64
	open   func() (io.ReadSeekCloser, error)
}

// ranges cuts a snapshot into ranges. Some may turn out to be zeros.
func ranges(snap *snapshot.Snapshot) []raw {
	state := snap.State()
	out := []raw{{state: true, size: uint64(len(state)), open: func() (io.ReadSeekCloser, error) {
		return nopSeekCloser{bytes.NewReader(state)}, nil
	}}}
	for _, ref := range snap.Manifest().Layers() {
		for off := uint64(0); off < ref.Size; off += PartSize {
			n := min(PartSize, ref.Size-off)
			out = append(out, raw{layer: ref.Digest, offset: off, size: n, open: func() (io.ReadSeekCloser, error) {
				f, err := snap.OpenLayer(ref)
				if err != nil {
					return nil, err
				}
				return section{io.NewSectionReader(f, int64(off), int64(n)), f}, nil
			}})
		}
	}
	return out
}

type nopSeekCloser struct{ io.ReadSeeker }

func (nopSeekCloser) Close() error { return nil }

type section struct {
	*io.SectionReader
	file *os.File
}

func (s section) Close() error { return s.file.Close() }

// order says in which order parts are taken.
type order int

const (
	anyOrder order = iota // several at a time
	inOrder
)

// cut makes the parts of a snapshot and calls take with each part and its
// content, which is valid only during the call. It returns the parts in order.
func cut(ctx context.Context, snap *snapshot.Snapshot, report *image.Reporter, o order, take func(context.Context, part, []byte) error) ([]part, error) {
	all := ranges(snap)
	made := make([]*part, len(all))
	before := closed()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(workers)
	for i, r := range all {
		turn, done := before, make(chan struct{})
		if before = done; o == anyOrder {
			turn = closed()
		}
		g.Go(func() error {
			p, content, err := r.compress(ctx)
			if err != nil {
				return err
			}
			select {
			case <-turn:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if p != nil {
				err = take(ctx, *p, content)
			}
			made[i] = p
			report.Bytes(int64(r.size))
			close(done)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var out []part
	for _, p := range made {
		if p != nil {
			out = append(out, *p)
		}
	}
	return out, nil
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// compress returns the part; nil for zeros of a layer, which need no part.
func (r raw) compress(ctx context.Context) (*part, []byte, error) {
	in, err := r.open()
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = in.Close() }() // only read from
	if !r.state {
		zero, err := onlyZeros(ctx, in)
		if err != nil || zero {
			return nil, nil, err
		}
		if _, err := in.Seek(0, io.SeekStart); err != nil {
			return nil, nil, err
		}
	}
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(window), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, nil, err
	}
	hash := sha256.New()
	n, err := io.CopyBuffer(io.MultiWriter(z, hash), withContext{ctx, in}, make([]byte, bufferSize))
	if err != nil {
		return nil, nil, err
	}
	if uint64(n) != r.size {
		return nil, nil, fmt.Errorf("%d bytes were read, not %d", n, r.size)
	}
	if err := z.Close(); err != nil {
		return nil, nil, err
	}
	p := &part{state: r.state, layer: r.layer, offset: r.offset, size: r.size, blob: describe(out.Bytes())}
	hash.Sum(p.digest[:0])
	return p, out.Bytes(), nil
}

// describe returns the descriptor of a blob, by its content.
func describe(b []byte) v1.Descriptor {
	return v1.Descriptor{Digest: hashOf(sha256.Sum256(b)), Size: int64(len(b))}
}

const bufferSize = 1 << 20

var zeros [layer.PageSize]byte

func onlyZeros(ctx context.Context, r io.Reader) (bool, error) {
	buf := make([]byte, bufferSize)
	for {
		n, err := withContext{ctx, r}.Read(buf)
		for b := buf[:n]; len(b) > 0; b = b[min(len(b), len(zeros)):] {
			if piece := b[:min(len(b), len(zeros))]; !bytes.Equal(piece, zeros[:len(piece)]) {
				return false, nil
			}
		}
		if errors.Is(err, io.EOF) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
}

// withContext is a reader that fails when its context has ended.
type withContext struct {
	ctx context.Context
	io.Reader
}

func (r withContext) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}
