package remote

import (
	"context"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
)

// NamespaceCA implements server.Service.
func (s *Service) NamespaceCA(ctx context.Context, n sandbox.Namespace) (sandbox.NamespaceCA, error) {
	return read(ctx, nodeconv.ToNamespaceCA)(s.node.GetNamespaceCA(ctx, &nodev1.GetNamespaceCARequest{Namespace: string(n)}))
}

// SetNamespaceCA implements server.Service.
func (s *Service) SetNamespaceCA(ctx context.Context, n sandbox.Namespace, spec sandbox.CASpec) (sandbox.NamespaceCA, error) {
	ask := nodeconv.FromCASpec(spec)
	ask.Namespace = string(n)
	return read(ctx, nodeconv.ToNamespaceCA)(s.node.SetNamespaceCA(ctx, ask))
}
