package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/layer"
)

// streamName is the file name of a layer whose digest is not known yet.
const streamName = "stream"

// ErrNoLayer says that the data of a source cannot be a layer: it is too long,
// or not a whole number of pages.
var ErrNoLayer = errors.New("it cannot be a layer")

// StreamLayer makes a layer of all data of src, which must not be more than most
// bytes. The data is hashed while it is written to disk, and sealed if the
// snapshot is private; it is stored nowhere else. An empty source makes no layer:
// the Ref is zero.
func (b *Builder) StreamLayer(ctx context.Context, src io.Reader, most uint64) (ref layer.Ref, err error) {
	if b.temp == "" {
		return ref, errors.New("add layer: the snapshot is committed or aborted")
	}
	f, err := b.layers.OpenFile(streamName, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return ref, fmt.Errorf("add layer: %w", err)
	}
	ref, err = b.stream(ctx, f, src, most)
	if err == nil && ref.Size > 0 {
		err = durable.Sync(f)
	}
	err = errors.Join(err, f.Close())
	done := false
	if err == nil {
		done, err = b.has(ref)
	}
	if err != nil || done || ref.Size == 0 {
		return ref, errors.Join(err, b.layers.Remove(streamName))
	}
	if err := durable.Place(b.layers, streamName, layerName(ref.Digest, b.Private())); err != nil {
		return ref, fmt.Errorf("add layer %s: %w", ref.Digest, err)
	}
	b.added[ref.Digest] = stored{ref.Size, b.Private()}
	return ref, nil
}

// stream copies src into a new file.
func (b *Builder) stream(ctx context.Context, f *os.File, src io.Reader, most uint64) (layer.Ref, error) {
	to := io.WriteCloser(nopCloser{f})
	if b.Private() {
		var err error
		if to, err = b.key.Writer(f); err != nil {
			return layer.Ref{}, err
		}
	}
	w := layer.NewWriter(to)
	// One byte above the limit shows that the source has too much.
	n, err := io.CopyBuffer(w, io.LimitReader(withContext{ctx, src}, int64(most)+1), make([]byte, streamBuffer))
	if err = errors.Join(err, to.Close()); err != nil {
		return layer.Ref{}, fmt.Errorf("add layer: %w", err)
	}
	switch {
	case uint64(n) > most:
		return layer.Ref{}, fmt.Errorf("add layer: %w: there is more than the %d bytes that it may have", ErrNoLayer, most)
	case n == 0:
		return layer.Ref{}, nil
	case n%layer.PageSize != 0:
		return layer.Ref{}, fmt.Errorf("add layer: %w: it has %d bytes, which is not a multiple of %d", ErrNoLayer, n, layer.PageSize)
	}
	return w.Ref(), nil
}

// streamBuffer is the size of one read.
const streamBuffer = 1 << 20

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// withContext is a reader that fails after its context has ended.
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

// MemoryLayers lists the layers that a running fork of the snapshot has in
// memory, each once.
func (m Manifest) MemoryLayers() []layer.Ref {
	memory := Manifest{Memory: m.Memory, GVisor: m.GVisor}
	return memory.Layers()
}

// UnsealedLayers lists the sealed layers of disks. Each fork has its own copy of
// them in memory.
func (s *Snapshot) UnsealedLayers() ([]layer.Ref, error) {
	if !s.manifest.Private {
		return nil, nil
	}
	var list []layer.Ref
	for _, ref := range (Manifest{Disks: s.manifest.Disks}).Layers() {
		f, sealed, err := s.openFile(ref)
		if err != nil {
			return nil, err
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
		if sealed {
			list = append(list, ref)
		}
	}
	return list, nil
}
