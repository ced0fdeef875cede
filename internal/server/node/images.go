package node

import (
	"context"

	"google.golang.org/protobuf/types/known/emptypb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// ListImages implements nodev1.NodeServer.
func (n *nodeAPI) ListImages(ctx context.Context, r *nodev1.ListImagesRequest) (*nodev1.ListImagesResponse, error) {
	_, items, next, err := pageOf(ctx, n, r, n.Service.Images,
		func(i sandbox.Image) (sandbox.Namespace, string) { return "", i.Digest }, server.Plain(nodeconv.FromImage))
	return &nodev1.ListImagesResponse{Images: items, Next: next}, err
}

// PublishImage implements nodev1.NodeServer.
func (n *nodeAPI) PublishImage(ctx context.Context, r *nodev1.PublishImageRequest) (*nodev1.Image, error) {
	wanted, err := nodeconv.ToPublish(r)
	if err == nil {
		err = server.MayPublish(ctx)
	}
	if err != nil {
		return nil, err
	}
	return answered(nodeconv.FromImage)(n.Service.PublishImage(ctx, wanted))
}

// UnpublishImage implements nodev1.NodeServer.
func (n *nodeAPI) UnpublishImage(ctx context.Context, r *nodev1.UnpublishImageRequest) (*emptypb.Empty, error) {
	if err := server.MayPublish(ctx); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, n.Service.UnpublishImage(ctx, r.GetImage())
}

// ListRegistryLogins implements nodev1.NodeServer.
func (n *nodeAPI) ListRegistryLogins(ctx context.Context, r *nodev1.ListRegistryLoginsRequest) (*nodev1.ListRegistryLoginsResponse, error) {
	_, items, next, err := pageOf(ctx, n, r, n.Service.RegistryLogins,
		func(l sandbox.RegistryLogin) (sandbox.Namespace, string) { return l.Namespace, string(l.Registry) }, server.Plain(nodeconv.FromRegistryLogin))
	return &nodev1.ListRegistryLoginsResponse{Logins: items, Next: next}, err
}

// SetRegistryLogin implements nodev1.NodeServer.
func (n *nodeAPI) SetRegistryLogin(ctx context.Context, r *nodev1.SetRegistryLoginRequest) (*nodev1.RegistryLogin, error) {
	namespace, host, err := registryOf(r)
	if err != nil {
		return nil, err
	}
	return answered(nodeconv.FromRegistryLogin)(n.Service.SetRegistryLogin(ctx, namespace, host, nodeconv.ToRegistryCredentials(r)))
}

// DeleteRegistryLogin implements nodev1.NodeServer.
func (n *nodeAPI) DeleteRegistryLogin(ctx context.Context, r *nodev1.DeleteRegistryLoginRequest) (*emptypb.Empty, error) {
	namespace, host, err := registryOf(r)
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, n.Service.DeleteRegistryLogin(ctx, namespace, host)
}

func registryOf(r interface {
	GetNamespace() string
	GetRegistry() string
},
) (n sandbox.Namespace, host sandbox.RegistryHost, err error) {
	if n, err = sandbox.ParseNamespace(r.GetNamespace()); err == nil {
		host, err = sandbox.ParseRegistryHost(r.GetRegistry())
	}
	return n, host, err
}
