package pack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
)

// Limits bound the size of an unpacked pack.
type Limits struct {
	// Bytes is the size of all layers together, zeros included.
	Bytes uint64
	// Ratio is the greatest ratio of content, without zeros, to the size of the
	// pack. Content up to RatioFloor is allowed in any case.
	Ratio, RatioFloor uint64
}

// DefaultLimits are the limits that the zero value stands for.
func DefaultLimits() Limits { return Limits{Bytes: 64 << 30, Ratio: 300, RatioFloor: 256 << 20} }

// UnpackOptions say how a pack becomes a snapshot. The zero value is valid.
type UnpackOptions struct {
	Limits Limits
	// Key is the key that must have signed the pack; nil accepts any pack.
	Key *Verifier
	// Accept may refuse a snapshot by its manifest, before its content is read.
	Accept func(snapshot.Manifest) error
	// Lend returns a snapshot of this host that has a layer, which then need
	// not be fetched, or nil. The snapshot is closed after use.
	Lend func(layer.Ref) *snapshot.Snapshot
	// Progress is called whenever there is progress, never concurrently.
	Progress func(image.Progress)
}

func (o UnpackOptions) limits() Limits {
	if o.Limits == (Limits{}) {
		return DefaultLimits()
	}
	return o.Limits
}

// source gives access to the blobs of a pack.
type source interface {
	// small reads a blob into memory, and compares it with its digest.
	small(ctx context.Context, d v1.Descriptor) ([]byte, error)
	// complete refuses a source with blobs that the manifest does not name.
	complete(ctx context.Context, a *artifact) error
	// phase is the phase that reading parts is reported as.
	phase() image.Phase
	// part opens a blob, after a comparison with its digest, and reports its
	// bytes.
	part(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error)
	// signatures returns the manifest of the signatures of a manifest, or nil if
	// it has no signature.
	signatures(ctx context.Context, manifest v1.Hash) ([]byte, error)
}

// unpack makes a snapshot at dir from the pack with this manifest. The caller
// has compared the manifest with its digest.
func unpack(ctx context.Context, src source, manifest []byte, dir string, report *image.Reporter, o UnpackOptions) (*snapshot.Snapshot, error) {
	if o.Key != nil {
		if err := o.Key.check(ctx, src, describe(manifest).Digest); err != nil {
			return nil, err
		}
	}
	a, err := parse(manifest)
	if err == nil {
		err = src.complete(ctx, a)
	}
	if err != nil {
		return nil, err
	}
	config, err := src.small(ctx, a.config)
	if err != nil {
		return nil, fmt.Errorf("the snapshot's manifest: %w", err)
	}
	m, err := snapshot.ParseManifest(config)
	if err != nil {
		return nil, fmt.Errorf("the snapshot's manifest: %w", err)
	}
	u := &unpacker{src: src, options: o, report: report}
	parts, err := u.check(a, m)
	if err != nil {
		return nil, err
	}
	return snapshot.Make(dir, func(b *snapshot.Builder) (*snapshot.Snapshot, error) {
		state, err := u.state(ctx, a.parts[0])
		if err != nil {
			return nil, fmt.Errorf("state: %w", err)
		}
		if err := u.layers(ctx, b, m.Layers(), parts); err != nil {
			return nil, err
		}
		return b.Commit(m, state)
	})
}

type unpacker struct {
	src     source
	options UnpackOptions
	report  *image.Reporter
	// budget is how many bytes of content, without zeros, may still be written.
	budget atomic.Int64
}

// check refuses, before any content is read, every pack that must not be
// unpacked.
func (u *unpacker) check(a *artifact, m snapshot.Manifest) ([][]part, error) {
	if err := Packable(m); err != nil {
		return nil, err
	}
	parts, err := a.arrange(m)
	if err != nil {
		return nil, err
	}
	limits := u.options.limits()
	var total, packed uint64
	for _, ref := range m.Layers() {
		if total += ref.Size; total > limits.Bytes {
			return nil, fmt.Errorf("it has more than %d bytes (--max-size allows more)", limits.Bytes)
		}
	}
	for _, p := range a.parts {
		packed += uint64(p.blob.Size)
	}
	// The bounds of the factors keep the product from overflowing.
	u.budget.Store(int64(max(limits.RatioFloor, min(packed, limits.Bytes)*min(limits.Ratio, maxRatio))))
	if accept := u.options.Accept; accept != nil {
		if err := accept(m); err != nil {
			return nil, err
		}
	}
	u.report.Phase(image.Progress{Phase: u.src.phase(), Total: int64(packed), Layers: len(parts)})
	return parts, nil
}

const maxRatio = 1 << 16

func (u *unpacker) layers(ctx context.Context, b *snapshot.Builder, refs []layer.Ref, parts [][]part) error {
	for i, ref := range refs {
		lent, err := u.borrow(ctx, b, ref)
		if err != nil {
			return err
		}
		if lent {
			u.skip(parts[i])
			continue
		}
		err = b.FillLayer(ctx, ref, func(f *os.File) error {
			g, ctx := errgroup.WithContext(ctx)
			g.SetLimit(workers)
			for _, p := range parts[i] {
				g.Go(func() error {
					if err := u.fill(ctx, f, p); err != nil {
						return fmt.Errorf("part at %d: %w", p.offset, err)
					}
					return nil
				})
			}
			return g.Wait()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// skip reports parts that need not be read.
func (u *unpacker) skip(parts []part) {
	for _, p := range parts {
		u.report.Bytes(p.blob.Size)
	}
}

// borrow links a layer of a snapshot that Lend returns, if that copy is
// undamaged.
func (u *unpacker) borrow(ctx context.Context, b *snapshot.Builder, ref layer.Ref) (bool, error) {
	if u.options.Lend == nil {
		return false, nil
	}
	from := u.options.Lend(ref)
	if from == nil {
		return false, nil
	}
	defer func() { _ = from.Close() }() // only read from
	f, err := from.OpenLayer(ref)
	if err != nil {
		return false, nil // the layer is fetched instead
	}
	defer func() { _ = f.Close() }() // likewise
	if layer.Copy(ctx, io.Discard, f, ref) != nil {
		return false, ctx.Err()
	}
	if err := b.LinkLayer(ref, from); err != nil {
		return false, err
	}
	return true, nil
}

// fill writes a part to its place in a file of zeros.
func (u *unpacker) fill(ctx context.Context, f *os.File, p part) error {
	at := int64(p.offset)
	return u.decompress(ctx, p, func(b []byte) error {
		for len(b) > 0 {
			n := run(b)
			if !bytes.Equal(b[:min(n, len(zeros))], zeros[:min(n, len(zeros))]) {
				if u.budget.Add(-int64(n)) < 0 {
					return fmt.Errorf("its content is more than %d times larger than the pack (--max-ratio allows more)", u.options.limits().Ratio)
				}
				if _, err := f.WriteAt(b[:n], at); err != nil {
					return err
				}
			}
			b, at = b[n:], at+int64(n)
		}
		return nil
	})
}

// run is the length of the first pages of b that are alike: all of them
// zeros, or all of them not.
func run(b []byte) int {
	first := bytes.Equal(b[:min(len(b), len(zeros))], zeros[:min(len(b), len(zeros))])
	n := min(len(b), len(zeros))
	for n < len(b) {
		piece := b[n:min(n+len(zeros), len(b))]
		if bytes.Equal(piece, zeros[:len(piece)]) != first {
			break
		}
		n += len(piece)
	}
	return n
}

func (u *unpacker) state(ctx context.Context, p part) ([]byte, error) {
	out := make([]byte, 0, p.size)
	err := u.decompress(ctx, p, func(b []byte) error {
		out = append(out, b...)
		return nil
	})
	return out, err
}

// decompress calls take with a part's content in pieces of whole pages; only the
// end of a state may be shorter. It fails if the content does not match the
// manifest.
func (u *unpacker) decompress(ctx context.Context, p part, take func([]byte) error) error {
	in, err := u.src.part(ctx, p.blob)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }() // only read from
	z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return err
	}
	defer z.Close()
	hash := sha256.New()
	buf := make([]byte, bufferSize)
	for done := uint64(0); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := io.ReadFull(z, buf)
		end := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !end {
			return fmt.Errorf("decompress: %w", err)
		}
		if done += uint64(n); done > p.size || end && done != p.size {
			return fmt.Errorf("it decompresses to other than %d bytes", p.size)
		}
		hash.Write(buf[:n])
		if err := take(buf[:n]); err != nil {
			return err
		}
		if end {
			break
		}
	}
	var got layer.Digest
	if hash.Sum(got[:0]); got != p.digest {
		return fmt.Errorf("its content has digest %s, the manifest says %s", got, p.digest)
	}
	return nil
}
