package remote

import (
	"context"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/sandbox"
)

// endedNode is a node that ends each stream before it has read what follows its opening.
type endedNode struct{ nodev1.NodeClient }

func (endedNode) UseSandbox(ctx context.Context, _ ...grpc.CallOption) (nodev1.Node_UseSandboxClient, error) {
	return &endedCall{ctx: ctx}, nil
}

type endedCall struct {
	nodev1.Node_UseSandboxClient
	ctx context.Context
}

func (c *endedCall) Context() context.Context { return c.ctx }

// Send does as gRPC does: only Recv says why a stream has ended.
func (c *endedCall) Send(m *nodev1.UseSandboxRequest) error {
	if m.GetOpen() != nil {
		return nil
	}
	return io.EOF
}

func (c *endedCall) Recv() (*nodev1.UseSandboxResponse, error) {
	if c.ctx.Err() != nil { // the stream was closed before anybody had asked
		return nil, status.FromContextError(c.ctx.Err()).Err()
	}
	s, err := status.New(codes.NotFound, "no sandbox").WithDetails(&nodev1.Error{Code: string(sandbox.CodeNotFound), Message: "no sandbox"})
	if err != nil {
		return nil, err
	}
	return nil, s.Err()
}

// TestOpenSaysWhyNot: a stream that the node ends while the session's first bytes are being sent
// fails with the node's answer.
func TestOpenSaysWhyNot(t *testing.T) {
	_, err := openStream(t.Context(), endedNode{}, sandbox.Key{Namespace: "default", Name: "nobody"})
	if !sandbox.HasCode(err, sandbox.CodeNotFound) {
		t.Errorf("%v", err)
	}
}
