package node

import (
	"context"
	"sync"

	"google.golang.org/grpc"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// GetSandboxByID implements nodev1.NodeServer. Its answer is the same for sandboxes of
// other namespaces as for ids of no sandbox.
func (n *nodeAPI) GetSandboxByID(ctx context.Context, r *nodev1.GetSandboxByIDRequest) (*nodev1.Sandbox, error) {
	id, err := sandbox.ParseID(r.GetId())
	if err != nil {
		return nil, err
	}
	s, err := n.Service.SandboxByID(ctx, id)
	if sandbox.HasCode(err, sandbox.CodeNotFound) || err == nil && !server.PrincipalOf(ctx).In(s.Namespace) {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "there is no sandbox with the id %s", sandbox.Quote(string(id)))
	}
	return answered(nodeconv.FromSandbox)(s, err)
}

// WatchToken implements nodev1.NodeServer.
func (n *nodeAPI) WatchToken(r *nodev1.WatchTokenRequest, out grpc.ServerStreamingServer[nodev1.Sandbox]) error {
	return n.serve(out.Context(), nodev1.Node_WatchToken_FullMethodName, r, func(ctx context.Context) error {
		who := server.PrincipalOf(ctx)
		leave, err := n.tokens.take(who.Name, tokensOfOne, tokensOfAll)
		if err != nil {
			return err
		}
		defer leave()
		token, err := nodeconv.ToToken(r)
		if err != nil {
			return err
		}
		s, until, err := n.Service.SandboxOfToken(ctx, token)
		if sandbox.HasCode(err, sandbox.CodeNotFound) || err == nil && !who.In(s.Namespace) {
			return sandbox.Errorf(sandbox.CodeNotFound, "there is no sandbox that the token is for")
		}
		if err != nil {
			return err
		}
		if err := out.Send(nodeconv.FromSandbox(s)); err != nil {
			return err
		}
		select {
		case <-until.Done():
			return nil
		case <-n.serving.Done():
			return sandbox.Errorf(sandbox.CodeClosing, "the daemon is shutting down").Try("Ask again when it is back")
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

// Bounds of the streams that clients hold open. A component that acts for itself
// is one principal.
const (
	usesOfOne   = 1024
	usesOfAll   = 4096
	tokensOfOne = 4096
	tokensOfAll = 16384
)

// seats counts the streams that are held open, within a bound for each principal and one
// for all. The zero value is ready to use.
type seats struct {
	mu    sync.Mutex // protects all following fields
	taken map[string]int
	all   int
}

// take counts one more stream; the caller calls leave at its end.
func (s *seats) take(principal string, ofOne, ofAll int) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.taken[principal] >= ofOne:
		return nil, sandbox.Errorf(sandbox.CodeCapacity, "%s has %d streams of this kind already", principal, ofOne).Try("End some first")
	case s.all >= ofAll:
		return nil, sandbox.Errorf(sandbox.CodeCapacity, "the node has %d streams of this kind already", ofAll).Try("Try again later")
	}
	if s.taken == nil {
		s.taken = map[string]int{}
	}
	s.taken[principal]++
	s.all++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.taken[principal]--; s.taken[principal] == 0 {
			delete(s.taken, principal)
		}
		s.all--
	}, nil
}
