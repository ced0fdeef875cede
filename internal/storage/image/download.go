package image

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"agentrun.dev/internal/storage/image/tree"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sync/errgroup"
)

// download fetches the layers of one image. A layer is unpacked when all of it
// has come and has the right digest. Meanwhile the layers above it are being
// fetched.
type download struct {
	puller     *remote.Puller
	repository name.Repository
	dir        string
	report     *Reporter
}

const (
	parallelLayers = 3
	layerAttempts  = 4
	firstBackoff   = 200 * time.Millisecond
	// stallTimeout is how long a layer may make no progress before it is
	// fetched again.
	stallTimeout = time.Minute
)

// apply fetches all layers and applies them in their order.
func (d *download) apply(ctx context.Context, m *manifest, t *tree.Tree) error {
	var total int64
	for _, l := range m.layers {
		total += l.Size
	}
	d.report.Phase(Progress{Phase: PhaseDownload, Total: total, Layers: len(m.layers)})
	g, ctx := errgroup.WithContext(ctx)
	slots := make(chan struct{}, parallelLayers)
	here := make([]chan struct{}, len(m.layers))
	for i := range m.layers {
		here[i] = make(chan struct{})
	}
	g.Go(func() error { // layers start in their order, because they are unpacked in it
		for i, l := range m.layers {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			g.Go(func() error {
				defer func() { <-slots }()
				if err := d.layerTo(ctx, l, d.path(i)); err != nil {
					return fmt.Errorf("layer %d of %d (%s): %w", i+1, len(m.layers), l.Digest, err)
				}
				close(here[i])
				return nil
			})
		}
		return nil
	})
	g.Go(func() error {
		for i := range m.layers {
			select {
			case <-here[i]:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if d.allHere(here) {
				d.report.Phase(Progress{Phase: PhaseUnpack, Done: total, Total: total, Layer: i + 1, Layers: len(m.layers)})
			}
			if err := applyFile(ctx, t, d.path(i), m.config.RootFS.DiffIDs[i]); err != nil {
				return fmt.Errorf("layer %d of %d: %w", i+1, len(m.layers), err)
			}
			if err := os.Remove(d.path(i)); err != nil {
				return err
			}
		}
		return nil
	})
	return g.Wait()
}

// prove fetches all layers one after the other, compares their digests, and keeps nothing.
func (d *download) prove(ctx context.Context, m *manifest) error {
	var total int64
	for _, l := range m.layers {
		total += l.Size
	}
	d.report.Phase(Progress{Phase: PhaseDownload, Total: total, Layers: len(m.layers)})
	for i, l := range m.layers {
		if err := d.layerTo(ctx, l, d.path(i)); err != nil {
			return fmt.Errorf("layer %d of %d (%s): %w", i+1, len(m.layers), l.Digest, err)
		}
		if err := os.Remove(d.path(i)); err != nil {
			return err
		}
	}
	return nil
}

func (d *download) path(i int) string { return filepath.Join(d.dir, "layer-"+strconv.Itoa(i)) }

func (d *download) allHere(here []chan struct{}) bool {
	for _, c := range here {
		select {
		case <-c:
		default:
			return false
		}
	}
	return true
}

// applyFile applies a layer from a file, and checks that it is the one in the
// configuration.
func applyFile(ctx context.Context, t *tree.Tree, path string, diffID v1.Hash) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return applyLayer(ctx, t, f, diffID)
}

func applyLayer(ctx context.Context, t *tree.Tree, r io.Reader, diffID v1.Hash) error {
	sum, err := t.Apply(ctx, r)
	if err != nil {
		return err
	}
	if got := newDigest(sum); string(got) != diffID.String() {
		return fmt.Errorf("its content has digest %s, the image's configuration says %s", got, diffID)
	}
	return nil
}

// errWrongContent says that a registry serves content that does not match its
// digest. Another attempt does not help.
var errWrongContent = errors.New("the registry served other content than the manifest names")

func (d *download) layerTo(ctx context.Context, l v1.Descriptor, path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(d.layer(ctx, l, f), f.Close())
}

// layer fetches one layer into an empty file, and tries again if the connection
// breaks.
func (d *download) layer(ctx context.Context, l v1.Descriptor, f *os.File) error {
	wait := firstBackoff
	for attempt := 1; ; attempt++ {
		err := d.attempt(ctx, l, f)
		if err == nil {
			return nil
		}
		var answer *transport.Error
		final := errors.Is(err, errWrongContent) || errors.As(err, &answer) && !answer.Temporary()
		if final || ctx.Err() != nil || attempt == layerAttempts {
			return err
		}
		select {
		case <-time.After(wait):
			wait *= 4
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (d *download) attempt(ctx context.Context, l v1.Descriptor, f *os.File) (err error) {
	ctx, cancel := context.WithCancelCause(context.WithValue(ctx, layerBody{}, true))
	defer cancel(nil)
	stalled := time.AfterFunc(stallTimeout, func() {
		cancel(fmt.Errorf("nothing came for %v", stallTimeout))
	})
	defer stalled.Stop()
	remoteLayer, err := d.puller.Layer(ctx, d.repository.Digest(l.Digest.String()))
	if err != nil {
		return err
	}
	body, err := remoteLayer.Compressed()
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	defer body.Close()
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := f.Truncate(0); err != nil { // from an earlier attempt
		return err
	}
	hash := sha256.New()
	in := &meter{Reader: body, moved: func(n int) {
		stalled.Reset(stallTimeout)
		d.report.Bytes(int64(n))
	}}
	// One byte more than the size shows that the content is too long.
	n, err := io.Copy(io.MultiWriter(f, hash), io.LimitReader(in, l.Size+1))
	got := newDigest([sha256.Size]byte(hash.Sum(nil)))
	switch {
	case n > l.Size:
		err = fmt.Errorf("%w: more than its %d bytes", errWrongContent, l.Size)
	case n == l.Size && string(got) != l.Digest.String():
		err = fmt.Errorf("%w: its digest is %s", errWrongContent, got)
	case n == l.Size:
		return nil // an error after the last byte does not matter
	case err == nil:
		err = io.ErrUnexpectedEOF
	}
	d.report.Bytes(-n)
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if n < l.Size {
		return fmt.Errorf("after %d of %d bytes: %w", n, l.Size, err)
	}
	return err
}

// meter reports how many bytes were read.
type meter struct {
	io.Reader
	moved func(n int)
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	m.moved(n)
	return n, err
}
