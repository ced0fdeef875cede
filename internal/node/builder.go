package node

import (
	"context"
	"io"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
)

// Builder makes the snapshot of a template's revision in a new folder.
type Builder interface {
	// Build makes the snapshot. It logs its progress, for people.
	Build(context.Context, BuildRequest) (sandbox.Built, error)
	// Finish completes a fork of a snapshot that was taken after the init
	// commands: it makes the fork ready and warms it up.
	Finish(ctx context.Context, spec sandbox.TemplateSpec, built sandbox.Built, sb engine.Sandbox) error
	// Rehearse makes a sandbox that will wait in a pool do the probable first work
	// of its user, without an effect.
	Rehearse(ctx context.Context, spec sandbox.TemplateSpec, sb engine.Sandbox) error
	// DropImage removes the name that templates of a namespace have for an image from the
	// namespace. It also removes the image itself, unless others have it, too. Without a
	// namespace the name is a published one. An image that does not exist counts as gone;
	// an image in use does not.
	DropImage(ctx context.Context, n sandbox.Namespace, name string) (gone bool, err error)
}

// BuildRequest asks for the snapshot of a template's revision at a stage, in the new
// folder Dir.
type BuildRequest struct {
	// Namespace is the namespace that may use the image.
	Namespace sandbox.Namespace
	Spec      sandbox.TemplateSpec
	// Image is the digest that the image must have; empty is whichever image the name
	// leads to.
	Image string
	Stage sandbox.Stage
	Dir   string
	Log   io.Writer
	// Join connects the build's machine. The caller uses, and closes, the machine
	// that Join returns.
	Join func(context.Context, engine.Sandbox) (engine.Sandbox, error)
	// Pull is called before the image is pulled. It is not called if the image is
	// there. After an error from Pull the image must not be pulled.
	Pull func() error
	// Credentials returns the credentials of the namespace for a registry.
	Credentials Credentials
	// TrustCA is the certificate (PEM) that programs in the sandbox have to trust, or
	// nil.
	TrustCA []byte
}

// Credentials returns the credentials of a namespace for a registry, if it has
// some.
type Credentials func(registry string) (user, password string, ok bool)

// ImageResolver is a builder that finds the image of a name without pulling it.
type ImageResolver interface {
	// ResolveImage returns the digest of an image that the namespace may use, from this
	// node or from the image's registry. It is empty if there is no such image, or if the
	// registry does not answer in time.
	ResolveImage(ctx context.Context, q ImageQuestion) (digest string)
}

// ImageQuestion asks which image a name means for a namespace.
type ImageQuestion struct {
	Namespace sandbox.Namespace
	Name      string
	// Credentials returns the credentials of the namespace for a registry.
	Credentials Credentials
	// Turn waits until a registry may be asked. It is not called if the image is
	// here. done is called after the registry was asked.
	Turn func(context.Context) (done func(), err error)
}
