package nodeconv

import (
	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromImage shows an image.
func FromImage(i sandbox.Image) *nodev1.Image {
	return &nodev1.Image{Digest: i.Digest, Names: i.Names, Published: i.Published, Platform: i.Platform, Size: i.Size, Stored: fromTime(i.Stored)}
}

// ToImage reads an image.
func ToImage(g *nodev1.Image) (sandbox.Image, error) {
	return sandbox.Image{
		Digest: g.GetDigest(), Names: g.GetNames(), Published: g.GetPublished(), Platform: g.GetPlatform(), Size: g.GetSize(), Stored: toTime(g.GetStored()),
	}, nil
}

// FromPublish is for PublishImage.
func FromPublish(p sandbox.PublishRequest) *nodev1.PublishImageRequest {
	return &nodev1.PublishImageRequest{Image: p.Image, FromNamespace: string(p.Namespace), Names: p.Names}
}

// ToPublish reads which image is to be published.
func ToPublish(g *nodev1.PublishImageRequest) (p sandbox.PublishRequest, err error) {
	var r convert.Reader
	p = sandbox.PublishRequest{Image: g.GetImage(), Names: g.GetNames()}
	if g.GetFromNamespace() != "" {
		p.Namespace = r.Namespace(g.GetFromNamespace())
	}
	return p, r.Err()
}

// FromRegistryLogin shows what anybody may know of credentials.
func FromRegistryLogin(l sandbox.RegistryLogin) *nodev1.RegistryLogin {
	return &nodev1.RegistryLogin{Namespace: string(l.Namespace), Registry: string(l.Registry), Username: l.Username, Changed: fromTime(l.Changed)}
}

// ToRegistryLogin reads the public part of credentials.
func ToRegistryLogin(g *nodev1.RegistryLogin) (sandbox.RegistryLogin, error) {
	var r convert.Reader
	return sandbox.RegistryLogin{
		Namespace: r.Namespace(g.GetNamespace()), Registry: r.RegistryHost(g.GetRegistry()), Username: g.GetUsername(), Changed: toTime(g.GetChanged()),
	}, r.Err()
}

// FromRegistryCredentials is for SetRegistryLogin. The caller adds the rest.
func FromRegistryCredentials(c sandbox.RegistryCredentials) *nodev1.SetRegistryLoginRequest {
	return &nodev1.SetRegistryLoginRequest{Username: c.Username, Password: string(c.Password)}
}

// ToRegistryCredentials reads them.
func ToRegistryCredentials(g *nodev1.SetRegistryLoginRequest) sandbox.RegistryCredentials {
	return sandbox.RegistryCredentials{Username: g.GetUsername(), Password: sandbox.Password(g.GetPassword())}
}
