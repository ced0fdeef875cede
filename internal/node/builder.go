package node

import (
	"context"
	"io"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
)

// Builder makes the snapshot of a template's revision in a new folder.
type Builder interface {
	// Build writes what happens to the log, for people.
	Build(context.Context, BuildRequest) (sandbox.Built, error)
	// Finish brings a fork of a snapshot that was taken after the init commands
	// to where one that was taken when ready is.
	Finish(ctx context.Context, spec sandbox.TemplateSpec, built sandbox.Built, sb engine.Sandbox) error
	// Rehearse has a sandbox that is going to wait in a pool do, without an effect,
	// what its user will probably do first.
	Rehearse(ctx context.Context, spec sandbox.TemplateSpec, sb engine.Sandbox) error
	// DropImage takes the name that templates of a namespace have for an image away from
	// the namespace, and removes the image unless others have it, too. Without a namespace
	// it is a published name. One that is not there is dropped; one in use is not.
	DropImage(ctx context.Context, n sandbox.Namespace, name string) (gone bool, err error)
}

// BuildRequest asks for the snapshot of a template's revision at a stage, in the new
// folder Dir.
type BuildRequest struct {
	// Namespace is whose image it is.
	Namespace sandbox.Namespace
	Spec      sandbox.TemplateSpec
	// Image is the digest that the image must have; empty is whichever the name leads to.
	Image string
	Stage sandbox.Stage
	Dir   string
	Log   io.Writer
	// Join connects the machine that is built in. Whoever has called it uses, and
	// closes, what it returns.
	Join func(context.Context, engine.Sandbox) (engine.Sandbox, error)
	// Pull is called before the image is pulled, and not if it is there. Whoever has
	// returned an error is not to.
	Pull func() error
	// Credentials are those of the namespace for a registry.
	Credentials Credentials
	// TrustCA is the certificate (PEM) that programs in the sandbox are to trust; nil
	// is none.
	TrustCA []byte
}

// Credentials are those of a namespace for a registry, if it has some.
type Credentials func(registry string) (user, password string, ok bool)

// ImageResolver is a builder that knows which image a name leads to, without pulling it.
type ImageResolver interface {
	// ResolveImage gives the digest of an image that the namespace may use, here or at the
	// image's registry. It is empty if there is no such image, or if the registry does not
	// answer in time.
	ResolveImage(ctx context.Context, q ImageQuestion) (digest string)
}

// ImageQuestion asks which image a name leads a namespace to.
type ImageQuestion struct {
	Namespace sandbox.Namespace
	Name      string
	// Credentials are those of the namespace for a registry.
	Credentials Credentials
	// Turn waits until a registry may be asked, and not if the image is here. done is
	// called when it was.
	Turn func(context.Context) (done func(), err error)
}
