package node

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// ApplySecret implements nodev1.NodeServer.
func (n *nodeAPI) ApplySecret(ctx context.Context, r *nodev1.ApplySecretRequest) (*nodev1.Secret, error) {
	return writeSecret(ctx, r, n.Service.ApplySecret)
}

// PatchSecret implements nodev1.NodeServer.
func (n *nodeAPI) PatchSecret(ctx context.Context, r *nodev1.PatchSecretRequest) (*nodev1.Secret, error) {
	return writeSecret(ctx, r, n.Service.SetSecret)
}

// secretRequest is a request with values of a secret.
type secretRequest interface {
	objectRequest
	GetData() map[string][]byte
}

func writeSecret(ctx context.Context, r secretRequest, write func(context.Context, sandbox.Key, sandbox.SecretData) (sandbox.Secret, error)) (*nodev1.Secret, error) {
	return answered(nodeconv.FromSecret)(of(ctx, r, func(ctx context.Context, k sandbox.Key) (sandbox.Secret, error) {
		return write(ctx, k, nodeconv.ToSecretData(r))
	}))
}

// GetSecret implements nodev1.NodeServer.
func (n *nodeAPI) GetSecret(ctx context.Context, r *nodev1.GetSecretRequest) (*nodev1.Secret, error) {
	return answered(nodeconv.FromSecret)(of(ctx, r, n.Service.Secret))
}

// ListSecrets implements nodev1.NodeServer.
func (n *nodeAPI) ListSecrets(ctx context.Context, r *nodev1.ListSecretsRequest) (*nodev1.ListSecretsResponse, error) {
	_, items, next, err := pageOf(ctx, n, r, n.Service.Secrets,
		func(s sandbox.Secret) (sandbox.Namespace, string) { return s.Namespace, string(s.Name) }, server.Plain(nodeconv.FromSecret))
	return &nodev1.ListSecretsResponse{Secrets: items, Next: next}, err
}

// DeleteSecret implements nodev1.NodeServer.
func (n *nodeAPI) DeleteSecret(ctx context.Context, r *nodev1.DeleteSecretRequest) (*emptypb.Empty, error) {
	_, err := of(ctx, r, func(ctx context.Context, k sandbox.Key) (struct{}, error) {
		return struct{}{}, n.Service.DeleteSecret(ctx, k)
	})
	return &emptypb.Empty{}, err
}

// GetQuota implements nodev1.NodeServer.
func (n *nodeAPI) GetQuota(ctx context.Context, r *nodev1.GetQuotaRequest) (*nodev1.Quota, error) {
	in, err := sandbox.ParseNamespace(r.GetNamespace())
	if err != nil {
		return nil, err
	}
	return answered(nodeconv.FromQuotaUse)(n.Service.QuotaOf(ctx, in))
}

// SetQuota implements nodev1.NodeServer.
func (n *nodeAPI) SetQuota(ctx context.Context, r *nodev1.SetQuotaRequest) (*nodev1.Quota, error) {
	q, err := nodeconv.ToQuota(r)
	if err != nil {
		return nil, err
	}
	return answered(nodeconv.FromQuotaUse)(n.Service.SetQuota(ctx, q))
}

// logPart is the greatest part of a log in one message.
const logPart = 64 << 10

// GetTemplateLog implements nodev1.NodeServer.
func (n *nodeAPI) GetTemplateLog(r *nodev1.GetTemplateLogRequest, out grpc.ServerStreamingServer[nodev1.TemplateLog]) error {
	return n.serve(out.Context(), nodev1.Node_GetTemplateLog_FullMethodName, r, func(ctx context.Context) error {
		ask, err := nodeconv.ToBuildLogRequest(r)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(n.serving, cancel)()
		w := &logWriter{out: out}
		ask.Begun = func(size int64) { w.err = out.Send(&nodev1.TemplateLog{Size: size}) }
		err = n.Service.CopyBuildLog(ctx, ask, w)
		if n.serving.Err() != nil {
			return sandbox.Errorf(sandbox.CodeClosing, "the daemon is shutting down").Try("Ask again when it is back")
		}
		return err
	})
}

// logWriter sends a log to the client.
type logWriter struct {
	out grpc.ServerStreamingServer[nodev1.TemplateLog]
	err error // of the first message
}

// Write implements io.Writer.
func (w *logWriter) Write(p []byte) (sent int, err error) {
	if w.err != nil {
		return 0, w.err
	}
	for sent < len(p) {
		part := p[sent:min(len(p), sent+logPart)]
		if err := w.out.Send(&nodev1.TemplateLog{Data: part}); err != nil {
			return sent, err
		}
		sent += len(part)
	}
	return sent, nil
}
