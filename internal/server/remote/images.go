package remote

import (
	"context"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
)

// images is the feature that the calls of this file came with.
const images = "images"

// Images implements server.Service.
func (s *Service) Images(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Image, error) {
	if err := s.needs(ctx, images); err != nil {
		return nil, err
	}
	return list(ctx, p, func(limit uint32, after string) ([]*nodev1.Image, string, error) {
		r, err := s.node.ListImages(ctx, &nodev1.ListImagesRequest{Namespace: string(n), Limit: limit, After: after})
		return r.GetImages(), r.GetNext(), err
	}, nodeconv.ToImage)
}

// PublishImage implements server.Service.
func (s *Service) PublishImage(ctx context.Context, r sandbox.PublishRequest) (sandbox.Image, error) {
	if err := s.needs(ctx, images); err != nil {
		return sandbox.Image{}, err
	}
	return read(ctx, nodeconv.ToImage)(s.node.PublishImage(ctx, nodeconv.FromPublish(r)))
}

// UnpublishImage implements server.Service.
func (s *Service) UnpublishImage(ctx context.Context, image string) error {
	if err := s.needs(ctx, images); err != nil {
		return err
	}
	return done(ctx)(s.node.UnpublishImage(ctx, &nodev1.UnpublishImageRequest{Image: image}))
}

// RegistryLogins implements server.Service.
func (s *Service) RegistryLogins(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.RegistryLogin, error) {
	if err := s.needs(ctx, images); err != nil {
		return nil, err
	}
	return list(ctx, p, func(limit uint32, after string) ([]*nodev1.RegistryLogin, string, error) {
		r, err := s.node.ListRegistryLogins(ctx, &nodev1.ListRegistryLoginsRequest{Namespace: string(n), Limit: limit, After: after})
		return r.GetLogins(), r.GetNext(), err
	}, nodeconv.ToRegistryLogin)
}

// SetRegistryLogin implements server.Service.
func (s *Service) SetRegistryLogin(ctx context.Context, n sandbox.Namespace, registry sandbox.RegistryHost, c sandbox.RegistryCredentials) (sandbox.RegistryLogin, error) {
	if err := s.needs(ctx, images); err != nil {
		return sandbox.RegistryLogin{}, err
	}
	ask := nodeconv.FromRegistryCredentials(c)
	ask.Namespace, ask.Registry = string(n), string(registry)
	return read(ctx, nodeconv.ToRegistryLogin)(s.node.SetRegistryLogin(ctx, ask))
}

// DeleteRegistryLogin implements server.Service.
func (s *Service) DeleteRegistryLogin(ctx context.Context, n sandbox.Namespace, registry sandbox.RegistryHost) error {
	if err := s.needs(ctx, images); err != nil {
		return err
	}
	return done(ctx)(s.node.DeleteRegistryLogin(ctx, &nodev1.DeleteRegistryLoginRequest{Namespace: string(n), Registry: string(registry)}))
}
