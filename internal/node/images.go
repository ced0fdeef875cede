package node

import (
	"context"
	"errors"

	"agentrun.dev/internal/sandbox"
)

// ImageStore stores the images that templates are made of.
type ImageStore interface {
	// Images returns the images that a namespace may use, sorted by digest,
	// beginning after the digest of the page.
	Images(n sandbox.Namespace, p sandbox.Page) ([]sandbox.Image, error)
	Publish(ctx context.Context, r sandbox.PublishRequest) (sandbox.Image, error)
	Unpublish(ctx context.Context, image string) error
	// Digests returns the digests of the first images on the node, of all namespaces,
	// sorted.
	Digests(most int) ([]string, error)
}

// shownImages bounds how many images a node's status names: the status is sent with
// each change.
const shownImages = 1000

// imageDigests returns the digests for the node's status.
func (m *Manager) imageDigests() ([]string, error) {
	if m.cfg.Images == nil {
		return nil, nil
	}
	return m.cfg.Images.Digests(shownImages)
}

// images returns the store of images, or an error if the daemon has no store.
func (m *Manager) images() (ImageStore, error) {
	if m.cfg.Images == nil {
		return nil, sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon does not list or publish images")
	}
	return m.cfg.Images, nil
}

// Images lists the images that a namespace may use: its own and those that are published.
func (m *Manager) Images(_ context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Image, error) {
	images, err := m.images()
	if err != nil {
		return nil, err
	}
	return images.Images(n, p)
}

// PublishImage lets all namespaces use an image that is on the node.
func (m *Manager) PublishImage(ctx context.Context, r sandbox.PublishRequest) (sandbox.Image, error) {
	images, err := m.images()
	if err := errors.Join(err, m.begin()); err != nil {
		return sandbox.Image{}, err
	}
	if err := r.Validate(); err != nil {
		return sandbox.Image{}, err
	}
	m.imageTurn.Lock() // the image cannot be removed meanwhile
	defer m.imageTurn.Unlock()
	img, err := images.Publish(ctx, r)
	if err == nil { // a request's body is not in the audit log
		m.cfg.Log.Warn("image published", "digest", img.Digest, "names", img.Names, "principal", string(sandbox.PrincipalOf(ctx)))
	}
	return img, err
}

// UnpublishImage ends the publication of an image: of one name, or with a digest
// of all its names. Namespaces that have pulled the image keep it, and so do
// snapshots of templates.
func (m *Manager) UnpublishImage(ctx context.Context, image string) error {
	images, err := m.images()
	if err := errors.Join(err, m.begin(), sandbox.ValidImageName("image", image)); err != nil {
		return err
	}
	m.imageTurn.Lock()
	defer m.imageTurn.Unlock()
	if err := images.Unpublish(ctx, image); err != nil {
		return err
	}
	m.cfg.Log.Warn("image unpublished", "image", image, "principal", string(sandbox.PrincipalOf(ctx)))
	return nil
}

// SetRegistryLogin gives a namespace credentials for a registry, and replaces earlier
// ones. Builds that begin later use them.
func (m *Manager) SetRegistryLogin(_ context.Context, n sandbox.Namespace, registry sandbox.RegistryHost, c sandbox.RegistryCredentials) (sandbox.RegistryLogin, error) {
	if err := m.beginMaking(); err != nil {
		return sandbox.RegistryLogin{}, err
	}
	if err := c.Validate(); err != nil {
		return sandbox.RegistryLogin{}, err
	}
	return m.logins.set(n, registry, c)
}

// DeleteRegistryLogin deletes the credentials of a namespace for a registry. Images that
// were pulled with them stay with the namespace as long as its templates name them.
func (m *Manager) DeleteRegistryLogin(_ context.Context, n sandbox.Namespace, registry sandbox.RegistryHost) error {
	if err := m.begin(); err != nil {
		return err
	}
	return m.logins.remove(n, registry)
}

// RegistryLogins lists the registries for which a namespace has credentials.
func (m *Manager) RegistryLogins(_ context.Context, n sandbox.Namespace, p sandbox.Page) (out []sandbox.RegistryLogin, _ error) {
	for _, l := range m.logins.list(n) {
		if string(l.Registry) > p.After {
			out = append(out, l)
		}
	}
	return out[:min(len(out), p.Most())], nil
}

func (m *Manager) credentials(n sandbox.Namespace) Credentials {
	return func(registry string) (user, password string, ok bool) { return m.logins.credentials(n, registry) }
}
