// Package template makes snapshots of templates. It boots the image, runs the
// init commands, waits until the sandbox is ready, runs the warm-up code in an
// interpreter, and then captures the sandbox.
package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/snapshot"
)

// Builder builds templates on an engine, from images of a store.
type Builder struct {
	Engine engine.Engine
	Images *image.Store
	// Pull has the options for pulling images that a namespace cannot use yet.
	Pull image.PullOptions
	// Guard decides which addresses are closed for such pulls; without a guard
	// nothing is pulled.
	Guard *addresses.Guard
	// PlainRoots is for engines that cannot read extended attributes.
	PlainRoots bool
}

var (
	_ node.Builder       = (*Builder)(nil)
	_ node.ImageResolver = (*Builder)(nil)
)

// machine is the machine that a template is built in. It gives way to sandboxes of
// users.
func machine(spec sandbox.TemplateSpec, root *os.File) engine.Spec {
	return engine.Spec{
		Root: root, Memory: spec.Memory, Disk: spec.Disk, VCPUs: processors(spec.MilliCPUs), Hostname: "template",
		Limits: engine.Limits{MilliCPUs: spec.MilliCPUs, Background: true}, Network: network(spec),
	}
}

// Build makes the snapshot of a template in dir.
func (b *Builder) Build(ctx context.Context, req node.BuildRequest) (built sandbox.Built, err error) {
	spec, log := req.Spec, req.Log
	handle, img, err := b.find(ctx, req)
	if err != nil {
		if img != nil { // it was pulled, and counts
			built = complete(spec, img)
		}
		return built, err
	}
	defer func() { err = errors.Join(err, handle.Close()) }()
	root, err := b.root(handle, img, log)
	if err != nil {
		return built, err
	}
	defer func() { _ = root.Close() }() // only read
	built = complete(spec, img)

	say(log, "boot %s", img.Digest)
	sb, err := b.Engine.Boot(ctx, machine(spec, root))
	if err != nil {
		return built, fmt.Errorf("boot image %s: %w", spec.Image, err)
	}
	joined, err := req.Join(ctx, sb)
	if err != nil {
		return built, errors.Join(fmt.Errorf("connect the build of image %s: %w", spec.Image, err), sb.Close())
	}
	sb = joined
	defer func() { err = errors.Join(whyCutOff(ctx, sb, err), sb.Close()) }()
	r := &run{agent: sb.Agent(), log: log, user: built.User, workdir: built.Workdir}
	err = within(ctx, spec, func(ctx context.Context) (err error) {
		built.Env, err = r.all(ctx, req, built.Env)
		return err
	})
	if err != nil {
		return built, err
	}
	say(log, "capture")
	if err := sb.Settle(ctx); err != nil {
		return built, err
	}
	// So no fork has to be told separately that this session is gone.
	if err := sb.Agent().Close(); err != nil {
		return built, err
	}
	snap, err := sb.Snapshot(ctx, req.Dir, snapshot.Still())
	if err != nil {
		return built, err
	}
	say(log, "ready: snapshot %s", snap.ID())
	return built, snap.Close()
}

// network is the interface of a template's sandboxes.
func network(spec sandbox.TemplateSpec) *engine.Network {
	if spec.Network == sandbox.NetworkNone {
		return nil
	}
	return node.Interface()
}

// Finish completes a fork of a snapshot that was taken after the init commands:
// it makes the fork ready and warms it up.
func (b *Builder) Finish(ctx context.Context, spec sandbox.TemplateSpec, built sandbox.Built, sb engine.Sandbox) error {
	r := &run{agent: sb.Agent(), log: io.Discard, user: built.User, workdir: built.Workdir}
	return within(ctx, spec, func(ctx context.Context) error { return r.finish(ctx, spec) })
}

// within bounds the time of steps that a template's author has defined.
func within(ctx context.Context, spec sandbox.TemplateSpec, do func(context.Context) error) error {
	limit := spec.BuildLimit()
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := do(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("it was cut off after %v, the template's buildTimeout for init commands, ready check and warm-up together: %w. Make them shorter, or raise buildTimeout", limit, err)
	}
	return err
}

// rehearsalPatience is how long a warm interpreter may take for an empty evaluation. The
// warm-up code can have made it hang for ever.
const rehearsalPatience = 30 * time.Second

// nothing is an empty program of each language.
var nothing = map[string]string{"python": "None", "bash": ":", "node": "undefined"}

// Rehearse runs an empty evaluation in the interpreter that was warmed up. A fork owns
// a page only once it has written to it. A first evaluation writes to hundreds of
// pages of the interpreter, the agent and the kernel. After the rehearsal, the claim
// of a waiting sandbox need not wait for these writes.
func (b *Builder) Rehearse(ctx context.Context, spec sandbox.TemplateSpec, sb engine.Sandbox) error {
	if spec.Warmup == nil || nothing[spec.Warmup.Language] == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, rehearsalPatience)
	defer cancel()
	req := guestrpc.CodeRunRequest{Language: spec.Warmup.Language, Source: nothing[spec.Warmup.Language]}
	if _, err := sb.Agent().RunCode(ctx, req, io.Discard, io.Discard, nil); err != nil {
		return fmt.Errorf("use the warm %s kernel: %w", spec.Warmup.Language, err)
	}
	return nil
}

// find looks an image up among those of the template's namespace, and pulls it if it is not
// there. With an error it may return an image, which is then not the right one.
func (b *Builder) find(ctx context.Context, req node.BuildRequest) (*image.Handle, *image.Image, error) {
	text := req.Spec.Image
	img, err := b.Images.ResolveIn(string(req.Namespace), text)
	if req.Image != "" && (err != nil || string(img.Digest) != req.Image) {
		if pinned, there := b.Images.ResolveIn(string(req.Namespace), req.Image); there == nil { // its name may point to another image by now
			img, err = pinned, nil
		}
	}
	if errors.Is(err, image.ErrNotFound) {
		img, err = b.pull(ctx, req, err)
	}
	if unavailable(err) {
		err = fmt.Errorf("%w: %w", node.ErrInterrupted, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("image %s: %w", text, err)
	}
	if req.Image != "" && string(img.Digest) != req.Image {
		return nil, img, fmt.Errorf("image %s is %s now, and the template was applied when it was %s, which is not here: apply it again to take the new one", text, img.Digest, req.Image)
	}
	handle, err := b.Images.Open(ctx, img.Digest)
	if errors.Is(err, image.ErrNotFound) { // it was dropped with the last template that used it
		err = fmt.Errorf("%w: %w", node.ErrInterrupted, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("image %s: %w", text, err)
	}
	return handle, img, nil
}

// resolving bounds how long a registry may take to resolve a name, including the wait for its
// turn.
const resolving = 10 * time.Second

// ResolveImage implements node.ImageResolver. It is no error if a registry does not answer: the
// build asks again, and reports the reason.
func (b *Builder) ResolveImage(ctx context.Context, q node.ImageQuestion) string {
	img, err := b.Images.ResolveIn(string(q.Namespace), q.Name)
	if err == nil {
		return string(img.Digest)
	}
	if !errors.Is(err, image.ErrNotFound) {
		return "" // the build reports the error
	}
	ref, err := image.ParseReference(q.Name)
	if _, bare := image.ParseDigest(q.Name); err != nil || bare == nil { // registries need more than a digest
		return "" // likewise
	}
	ctx, cancel := context.WithTimeout(ctx, resolving)
	defer cancel()
	if q.Turn != nil {
		done, err := q.Turn(ctx)
		if err != nil {
			return "" // the turns are taken by slow registries of others: the build asks
		}
		defer done()
	}
	digest, err := image.Lookup(ctx, ref, b.pullOptions(q.Namespace, q.Credentials))
	if err != nil {
		return "" // likewise
	}
	return string(digest)
}

// pull pulls an image for the namespace of a template, after it was not found
// there.
func (b *Builder) pull(ctx context.Context, req node.BuildRequest, notFound error) (*image.Image, error) {
	text := req.Spec.Image
	if _, err := image.ParseDigest(text); err == nil {
		return nil, fmt.Errorf("%w that namespace %s may use: write REGISTRY/NAME@%s, for the node to ask the registry", notFound, req.Namespace, text)
	}
	ref, err := image.ParseReference(text)
	if err != nil {
		return nil, err
	}
	if err := req.Pull(); err != nil {
		return nil, err
	}
	say(req.Log, "pull %s", ref)
	return b.Images.Pull(ctx, ref, b.pullOptions(req.Namespace, req.Credentials))
}

// pullOptions are the options for all requests to a registry on behalf of a
// namespace.
func (b *Builder) pullOptions(n sandbox.Namespace, credentials node.Credentials) image.PullOptions {
	o := b.Pull
	o.Tenant = &image.Tenant{Namespace: string(n), Credentials: credentials, Guard: b.Guard}
	return o
}

// DropImage removes an image's name that templates of a namespace no longer use.
func (b *Builder) DropImage(ctx context.Context, n sandbox.Namespace, name string) (gone bool, err error) {
	if n == "" {
		_, err = b.Images.Remove(ctx, name)
	} else {
		err = b.Images.RemoveIn(ctx, string(n), name)
	}
	switch {
	case errors.Is(err, image.ErrInUse):
		return false, nil
	case errors.Is(err, image.ErrNotFound):
		return true, nil
	}
	return err == nil, err
}

// root opens the root filesystem in the form that the engine can read.
func (b *Builder) root(h *image.Handle, img *image.Image, log io.Writer) (*os.File, error) {
	if !b.PlainRoots {
		return h.Root()
	}
	if len(img.Capabilities) > 0 {
		say(log, "note: %s cannot carry the file capabilities of %s", b.Engine.Name(), strings.Join(img.Capabilities, ", "))
	}
	return h.PlainRoot()
}

// complete fills the settings that a template leaves open from its image.
func complete(spec sandbox.TemplateSpec, img *image.Image) sandbox.Built {
	built := sandbox.Built{Image: string(img.Digest), Pulled: uint64(img.Size()), Env: sandbox.Env{}, Workdir: spec.Workdir, User: spec.User}
	for _, e := range img.Config.Env {
		name, value, _ := strings.Cut(e, "=")
		built.Env[name] = value
	}
	maps.Copy(built.Env, spec.Env)
	if built.User == "" {
		built.User = img.Config.User
	}
	if built.Workdir == "" {
		built.Workdir = sandbox.DefaultWorkdir
	}
	return built
}

// processors is the number of processors for a sandbox that may use that many
// thousandths of one.
func processors(milli uint64) int { return int((milli + 999) / 1000) }

// say writes a line to a build's log. The log is for people, so a failed write
// does not fail the build.
func say(log io.Writer, format string, args ...any) {
	_, _ = fmt.Fprintf(log, "== "+format+"\n", args...)
}

// run is a sandbox that becomes a template's snapshot.
type run struct {
	agent         *guestrpc.Client
	log           io.Writer
	user, workdir string
	// root is the folder in which trust looks for files; empty is the sandbox's
	// own root.
	root string
}
