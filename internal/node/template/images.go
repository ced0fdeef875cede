package template

import (
	"context"
	"errors"

	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/image"
)

// Images shows and publishes the images of a store.
type Images struct{ Store *image.Store }

var _ node.ImageStore = Images{}

// Images lists the images that a namespace may use.
func (i Images) Images(n sandbox.Namespace, p sandbox.Page) (out []sandbox.Image, err error) {
	some, err := i.Store.ListIn(string(n), p.After, p.Most())
	for _, v := range some {
		out = append(out, shown(v.Image, v.Published))
	}
	return out, err
}

// Digests returns the digests of the first images on the node.
func (i Images) Digests(most int) (out []string, err error) {
	all, err := i.Store.Digests()
	for _, d := range all[:min(len(all), most)] {
		out = append(out, string(d))
	}
	return out, err
}

func shown(img *image.Image, published bool) sandbox.Image {
	return sandbox.Image{
		Digest: string(img.Digest), Names: img.Names, Published: published, Platform: img.Platform, Size: uint64(img.Size()), Stored: img.Stored,
	}
}

// Publish lets all namespaces use an image.
func (i Images) Publish(ctx context.Context, r sandbox.PublishRequest) (sandbox.Image, error) {
	var names []image.Reference
	for _, text := range r.Names {
		ref, err := image.ParseReference(text)
		if err != nil {
			return sandbox.Image{}, sandbox.Invalid("names", "%v", err)
		}
		names = append(names, ref)
	}
	img, err := i.Store.Publish(ctx, string(r.Namespace), r.Image, names...)
	if err != nil {
		return sandbox.Image{}, publishing(r.Image, err)
	}
	return shown(img, true), nil
}

// Unpublish ends the publication of an image.
func (i Images) Unpublish(ctx context.Context, text string) error {
	_, err := i.Store.Unpublish(ctx, text)
	return publishing(text, err)
}

// publishing turns the error of a call about an image that an admin has named
// into one for the admin.
func publishing(text string, err error) error {
	if errors.Is(err, image.ErrNotFound) {
		return sandbox.Errorf(sandbox.CodeNotFound, "image %s is not here", sandbox.Quote(text)).
			Try("Name it as a template of the namespace does, or by its digest; `agentrun image ls` shows both")
	}
	return err
}
