package tree

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/klauspost/compress/zstd"
)

// guard decompresses a layer's archive and bounds its expanded size.
type guard struct {
	ctx    context.Context //nolint:containedctx // a reader has no other way to end early
	limits Limits
	in     *counter // counts the compressed bytes that were read
	out    io.Reader
	stop   func()
	read   int64
	hash   hash.Hash
}

type counter struct {
	io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += int64(n)
	return n, err
}

// maxWindow is the window of zstd --ultra --long=27, the largest that decoders
// are expected to allow (RFC 8878, section 3.1.1.1.2, asks for at least 8 MiB).
const maxWindow = 128 << 20

var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

// newGuard recognizes the compression by the first bytes, because media types
// of real images are not always right. The digest of the uncompressed bytes is
// checked later.
func newGuard(ctx context.Context, r io.Reader, limits Limits) (*guard, error) {
	g := &guard{ctx: ctx, limits: limits, in: &counter{Reader: r}, hash: sha256.New(), stop: func() {}}
	in := bufio.NewReaderSize(g.in, 256<<10)
	head, err := in.Peek(len(zstdMagic))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read archive: %w", err)
	}
	switch {
	case bytes.HasPrefix(head, gzipMagic):
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, fmt.Errorf("decompress archive: %w", err)
		}
		g.out = z
	case bytes.HasPrefix(head, zstdMagic):
		z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, fmt.Errorf("decompress archive: %w", err)
		}
		g.out, g.stop = z, z.Close
	default:
		g.out = in
	}
	return g, nil
}

// sum is the digest of the bytes read so far.
func (g *guard) sum() (sum [sha256.Size]byte) {
	g.hash.Sum(sum[:0])
	return sum
}

// Close frees the decoder.
func (g *guard) Close() { g.stop() }

func (g *guard) Read(p []byte) (int, error) {
	if err := g.ctx.Err(); err != nil {
		return 0, context.Cause(g.ctx)
	}
	n, err := g.out.Read(p)
	g.read += int64(n)
	_, _ = g.hash.Write(p[:n]) // never fails
	// Headers and padding count, too; they take less than a quarter.
	if g.read/5*4 > g.limits.Bytes {
		return 0, refuse("the layer is larger than the %d bytes that an image may have", g.limits.Bytes)
	}
	if ratioErr := g.checkRatio(g.read); ratioErr != nil {
		return 0, ratioErr
	}
	return n, err
}

// checkRatio refuses a layer that is too large compared with its compressed
// form. Sparse files count as compression, too.
func (g *guard) checkRatio(expanded int64) error {
	if expanded > g.limits.RatioFloor && expanded/g.limits.Ratio > g.in.n {
		return refuse("the layer expands to more than %d times its size", g.limits.Ratio)
	}
	return nil
}
