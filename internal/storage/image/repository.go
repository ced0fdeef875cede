package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Repository is the repository of a reference in its registry, for reading and
// writing. Its content need not be an image.
type Repository struct {
	ref    Reference
	at     name.Reference
	gate   *gate
	puller *remote.Puller
	pusher *remote.Pusher
}

// Open prepares to speak to a reference's registry. It sends no request yet.
func (r Registries) Open(ref Reference, more ...remote.Option) (*Repository, error) {
	return r.open(ref, nil, more...)
}

// open is Open, for a tenant if tenant is set.
func (r Registries) open(ref Reference, tenant *Tenant, more ...remote.Option) (*Repository, error) {
	at, err := r.reference(ref)
	if err != nil {
		return nil, err
	}
	gate, err := r.transport(ref, tenant)
	if err != nil {
		return nil, err
	}
	options := append([]remote.Option{
		remote.WithTransport(gate), remote.WithAuthFromKeychain(r.keychain(ref, tenant)), remote.WithUserAgent("agentrun"),
	}, more...)
	puller, err := remote.NewPuller(options...)
	if err != nil {
		return nil, err
	}
	pusher, err := remote.NewPusher(options...)
	if err != nil {
		return nil, err
	}
	return &Repository{ref: ref, at: at, gate: gate, puller: puller, pusher: pusher}, nil
}

// Close ends idle connections.
func (r *Repository) Close() { r.gate.close() }

// Explain adds the next step to an error of this registry that has one.
func (r *Repository) Explain(err error) error { return explain(err, r.ref) }

// Name is that of the repository, without tag and digest.
func (r *Repository) Name() string { return r.at.Context().Name() }

// Tag is another name in the repository of the reference.
func (r *Repository) Tag(tag string) name.Reference { return r.at.Context().Tag(tag) }

// Reference is the reference itself, for Get and Put.
func (r *Repository) Reference() name.Reference { return r.at }

// ErrNotThere says that a registry knows no such tag or digest.
var ErrNotThere = errors.New("the registry has no such thing")

// Pinned says that the reference is a digest, not a tag.
func (r *Repository) Pinned() bool {
	_, ok := r.at.(name.Digest)
	return ok
}

// Get resolves a reference of this repository: it returns the bytes of the
// manifest, and the digest that they were compared with. ErrNotThere: there is
// no such manifest.
func (r *Repository) Get(ctx context.Context, ref name.Reference) (raw []byte, desc v1.Descriptor, err error) {
	d, err := r.get(ctx, ref)
	if err != nil {
		return nil, desc, err
	}
	return d.Manifest, d.Descriptor, nil
}

func (r *Repository) get(ctx context.Context, ref name.Reference) (*remote.Descriptor, error) {
	d, err := r.puller.Get(ctx, ref)
	var answer *transport.Error
	if errors.As(err, &answer) && answer.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("%w: %w", ErrNotThere, err)
	}
	return d, err
}

// Fetch fetches a blob into an empty file, and compares its size and digest. It
// tries again if the connection breaks.
func (r *Repository) Fetch(ctx context.Context, blob v1.Descriptor, f *os.File, report *Reporter) error {
	d := &download{puller: r.puller, repository: r.at.Context(), report: report}
	return d.layer(ctx, blob, f)
}

// Blob is content to upload.
type Blob struct {
	Descriptor v1.Descriptor
	// Open returns the content from its beginning. It is called again if the
	// content has to be sent again.
	Open func() (io.ReadCloser, error)
}

// Upload sends a blob, unless the repository has it. It gives up if the registry
// accepts no bytes for a while.
func (r *Repository) Upload(ctx context.Context, b Blob) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	open := b.Open
	b.Open = func() (io.ReadCloser, error) {
		body, err := open()
		if err != nil {
			return nil, err
		}
		return watch(body, stallTimeout, func() { cancel(fmt.Errorf("nothing was taken for %v", stallTimeout)) }), nil
	}
	err := r.pusher.Upload(ctx, r.at.Context(), upload{b})
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

// watch calls stalled when body was not read for a while.
func watch(body io.ReadCloser, patience time.Duration, stalled func()) io.ReadCloser {
	return &watched{body: body, patience: patience, timer: time.AfterFunc(patience, stalled)}
}

// watched is a body that has to be read continually.
type watched struct {
	body     io.ReadCloser
	patience time.Duration

	mu    sync.Mutex  // protects timer: a body may be closed while it is read
	timer *time.Timer // nil when it was closed
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.body.Read(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil {
		w.timer.Reset(w.patience)
	}
	return n, err
}

func (w *watched) Close() error {
	w.mu.Lock()
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
	w.mu.Unlock()
	return w.body.Close()
}

// Put gives a manifest, whose blobs were uploaded, a name in this repository.
func (r *Repository) Put(ctx context.Context, ref name.Reference, raw []byte, mediaType types.MediaType) error {
	return r.pusher.Put(ctx, ref, document{raw, mediaType})
}

// PutImage uploads an image with all that belongs to it.
func (r *Repository) PutImage(ctx context.Context, ref name.Reference, img v1.Image) error {
	return r.pusher.Push(ctx, ref, img)
}

// GetImage resolves a reference of this repository to an image that is fetched
// when it is read. ErrNotThere: there is no such image.
func (r *Repository) GetImage(ctx context.Context, ref name.Reference) (v1.Image, error) {
	d, err := r.get(ctx, ref)
	if err != nil {
		return nil, err
	}
	return d.Image()
}

// upload presents a Blob to the library as a layer.
type upload struct{ Blob }

func (u upload) Digest() (v1.Hash, error)             { return u.Descriptor.Digest, nil }
func (u upload) DiffID() (v1.Hash, error)             { return u.Descriptor.Digest, nil }
func (u upload) Compressed() (io.ReadCloser, error)   { return u.Open() }
func (u upload) Uncompressed() (io.ReadCloser, error) { return u.Open() }
func (u upload) Size() (int64, error)                 { return u.Descriptor.Size, nil }
func (u upload) MediaType() (types.MediaType, error)  { return u.Descriptor.MediaType, nil }

// document is a manifest that is sent unchanged.
type document struct {
	raw       []byte
	mediaType types.MediaType
}

func (d document) RawManifest() ([]byte, error)        { return d.raw, nil }
func (d document) MediaType() (types.MediaType, error) { return d.mediaType, nil }
