package remote

import (
	"context"
	"errors"
	"io"
	"math"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
)

// CopyBuildLog implements server.Service.
func (s *Service) CopyBuildLog(ctx context.Context, r sandbox.BuildLogRequest, w io.Writer) error {
	if err := r.Validate(); err != nil { // an unknown stage has no form in a message
		return err
	}
	if err := s.needs(ctx, "template-logs"); err != nil {
		return err
	}
	if r.Tail != nil {
		r.Tail = new(min(*r.Tail, math.MaxInt32))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the call
	log, err := s.node.GetTemplateLog(ctx, nodeconv.FromBuildLogRequest(r))
	for begun := false; err == nil; {
		var part *nodev1.TemplateLog
		if part, err = log.Recv(); err != nil {
			break
		}
		if !begun && r.Begun != nil {
			r.Begun(part.GetSize())
		}
		begun = true
		if _, err := w.Write(part.GetData()); err != nil {
			return err
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return problem(ctx, err)
}

// ApplySecret implements server.Service.
func (s *Service) ApplySecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error) {
	if err := s.needs(ctx, "secrets"); err != nil {
		return sandbox.Secret{}, err
	}
	ask := nodeconv.FromSecretData(data)
	ask.Namespace, ask.Name = string(k.Namespace), string(k.Name)
	return read(ctx, nodeconv.ToSecret)(s.node.ApplySecret(ctx, ask))
}

// SetSecret implements server.Service.
func (s *Service) SetSecret(ctx context.Context, k sandbox.Key, data sandbox.SecretData) (sandbox.Secret, error) {
	if err := s.needs(ctx, "secrets"); err != nil {
		return sandbox.Secret{}, err
	}
	return read(ctx, nodeconv.ToSecret)(s.node.PatchSecret(ctx, &nodev1.PatchSecretRequest{Namespace: string(k.Namespace), Name: string(k.Name), Data: data}))
}

// Secret implements server.Service.
func (s *Service) Secret(ctx context.Context, k sandbox.Key) (sandbox.Secret, error) {
	if err := s.needs(ctx, "secrets"); err != nil {
		return sandbox.Secret{}, err
	}
	return read(ctx, nodeconv.ToSecret)(s.node.GetSecret(ctx, &nodev1.GetSecretRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// Secrets implements server.Service.
func (s *Service) Secrets(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Secret, error) {
	if n == "" {
		return nil, nil // no secret is in it; the API would take it for the default one
	}
	if err := s.needs(ctx, "secrets"); err != nil {
		return nil, err
	}
	return list(ctx, p, func(limit uint32, after string) ([]*nodev1.Secret, string, error) {
		r, err := s.node.ListSecrets(ctx, &nodev1.ListSecretsRequest{Namespace: string(n), Limit: limit, After: after})
		return r.GetSecrets(), r.GetNext(), err
	}, nodeconv.ToSecret)
}

// DeleteSecret implements server.Service.
func (s *Service) DeleteSecret(ctx context.Context, k sandbox.Key) error {
	if err := s.needs(ctx, "secrets"); err != nil {
		return err
	}
	return done(ctx)(s.node.DeleteSecret(ctx, &nodev1.DeleteSecretRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// SetQuota implements server.Service.
func (s *Service) SetQuota(ctx context.Context, q sandbox.Quota) (sandbox.QuotaUse, error) {
	if err := s.needs(ctx, "quotas"); err != nil {
		return sandbox.QuotaUse{}, err
	}
	return read(ctx, nodeconv.ToQuotaUse)(s.node.SetQuota(ctx, nodeconv.FromQuota(q)))
}

// QuotaOf implements server.Service.
func (s *Service) QuotaOf(ctx context.Context, n sandbox.Namespace) (sandbox.QuotaUse, error) {
	if err := s.needs(ctx, "quotas"); err != nil {
		return sandbox.QuotaUse{}, err
	}
	return read(ctx, nodeconv.ToQuotaUse)(s.node.GetQuota(ctx, &nodev1.GetQuotaRequest{Namespace: string(n)}))
}

// SandboxByID implements server.Service.
func (s *Service) SandboxByID(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error) {
	if err := s.needs(ctx, "use"); err != nil {
		return sandbox.Sandbox{}, err
	}
	return read(ctx, nodeconv.ToSandbox)(s.node.GetSandboxByID(ctx, &nodev1.GetSandboxByIDRequest{Id: string(id)}))
}

// SandboxOfToken implements server.Service. The call to the node lasts until the context
// ends. The context also ends with ctx, and with the connection.
func (s *Service) SandboxOfToken(ctx context.Context, t sandbox.Token) (sandbox.Sandbox, context.Context, error) {
	if err := s.needs(ctx, "use"); err != nil {
		return sandbox.Sandbox{}, nil, err
	}
	until, end := context.WithCancel(ctx)
	w, err := s.node.WatchToken(until, nodeconv.FromToken(t))
	var got *nodev1.Sandbox
	if err == nil {
		got, err = w.Recv()
	}
	found, err := read(ctx, nodeconv.ToSandbox)(got, err)
	if err != nil {
		end()
		return sandbox.Sandbox{}, nil, err
	}
	go func() {
		_, _ = w.Recv() // any further message or error ends the watch
		end()
	}()
	return found, until, nil
}

// identity returns the field with the identity of a request, if it has one.
func (s *Service) identity(ctx context.Context, o *sandbox.Once) (*nodev1.RequestIdentity, error) {
	return nodeconv.FromOnce(o), s.needsIf(ctx, o != nil, "identity")
}
