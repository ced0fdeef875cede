package restconv

import (
	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromImage shows an image.
func FromImage(i sandbox.Image) rest.Image {
	out := rest.Image{Digest: i.Digest, Names: []string{}, Published: i.Published, Platform: i.Platform, Size: int64(i.Size), Stored: i.Stored}
	out.Names = append(out.Names, i.Names...)
	return out
}

// ToImage reads an image.
func ToImage(g rest.Image) (sandbox.Image, error) {
	var r convert.Reader
	return sandbox.Image{
		Digest: g.Digest, Names: g.Names, Published: g.Published, Platform: g.Platform, Size: r.Size("size", g.Size), Stored: g.Stored,
	}, r.Err()
}

// FromPublish is for a POST that publishes an image.
func FromPublish(p sandbox.PublishRequest) rest.ImagePublish {
	return rest.ImagePublish{Image: p.Image, Namespace: string(p.Namespace), Names: p.Names}
}

// ToPublish reads which image is to be published.
func ToPublish(g rest.ImagePublish) (p sandbox.PublishRequest, err error) {
	var r convert.Reader
	p = sandbox.PublishRequest{Image: g.Image, Names: g.Names}
	if g.Namespace != "" {
		p.Namespace = r.Namespace(g.Namespace)
	}
	return p, r.Err()
}

// FromRegistryLogin shows what anybody may know of credentials.
func FromRegistryLogin(l sandbox.RegistryLogin) rest.RegistryLogin {
	return rest.RegistryLogin{Namespace: string(l.Namespace), Registry: string(l.Registry), Username: l.Username, Changed: l.Changed}
}

// ToRegistryLogin reads the public part of credentials.
func ToRegistryLogin(g rest.RegistryLogin) (sandbox.RegistryLogin, error) {
	var r convert.Reader
	return sandbox.RegistryLogin{
		Namespace: r.Namespace(g.Namespace), Registry: r.RegistryHost(g.Registry), Username: g.Username, Changed: g.Changed,
	}, r.Err()
}

// FromRegistryCredentials is for a PUT of credentials. The caller adds the registry.
func FromRegistryCredentials(c sandbox.RegistryCredentials) rest.RegistryCredentials {
	return rest.RegistryCredentials{Username: c.Username, Password: string(c.Password)}
}

// ToRegistryCredentials reads them.
func ToRegistryCredentials(g rest.RegistryCredentials) sandbox.RegistryCredentials {
	return sandbox.RegistryCredentials{Username: g.Username, Password: sandbox.Password(g.Password)}
}
