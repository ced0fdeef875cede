// Package remote is a service that a node's daemon serves over gRPC (api/node/v1), for
// programs that serve the sandboxes of other nodes. Calls that the node's daemon is too
// old for fail with sandbox.CodeUnimplemented.
package remote

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/nodeconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// Service is the service of a node at the other end of a connection.
type Service struct {
	node nodev1.NodeClient
	// self calls the node for the component itself, if node makes its calls for
	// another principal.
	self nodev1.NodeClient
	// features has the features that the node's API is known to have.
	features sync.Map
	streams  streams
}

var _ server.Service = (*Service)(nil)

// New makes the service of a connection, which stays the caller's.
func New(conn grpc.ClientConnInterface) *Service {
	s := &Service{node: nodev1.NewNodeClient(conn)}
	s.self = s.node
	if a, ok := conn.(*acting); ok {
		s.self = nodev1.NewNodeClient(a.ClientConnInterface)
	}
	return s
}

// problem returns the error of a call, as reported by the node.
func problem(ctx context.Context, err error) error {
	st := status.Convert(err)
	for _, d := range st.Details() {
		if e, ok := d.(*nodev1.Error); ok {
			return nodeconv.ToError(e)
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return sandbox.Errorf(server.CodeUnavailable, "the node does not answer").Because("%s", st.Message())
}

// read converts the answer of a call into a type of package sandbox.
func read[G, T any](ctx context.Context, to func(G) (T, error)) func(G, error) (T, error) {
	return func(got G, err error) (T, error) {
		if err != nil {
			var none T
			return none, problem(ctx, err)
		}
		return to(got)
	}
}

// maxLimit is the most that one call lists.
const maxLimit = 1000

// list asks for as many pages as are needed.
func list[G, T any](ctx context.Context, p sandbox.Page, call func(limit uint32, after string) ([]G, string, error), to func(G) (T, error)) (out []T, err error) {
	for after := p.After; len(out) < p.Most(); {
		got, next, err := call(uint32(min(p.Most()-len(out), maxLimit)), after)
		if err != nil {
			return nil, problem(ctx, err)
		}
		for _, g := range got {
			one, err := to(g)
			if err != nil {
				return nil, err
			}
			out = append(out, one)
		}
		if after = next; next == "" {
			break
		}
	}
	return out, nil
}

func toTemplate(g *nodev1.Template) (sandbox.Template, error) {
	t, _, err := nodeconv.ToTemplate(g)
	return t, err
}

func toPool(g *nodev1.Pool) (sandbox.Pool, error) {
	p, _, err := nodeconv.ToPool(g)
	return p, err
}

// ApplyTemplate implements server.Service.
func (s *Service) ApplyTemplate(ctx context.Context, k sandbox.Key, spec sandbox.TemplateSpec, owner ...sandbox.UID) (sandbox.Template, error) {
	ask := &nodev1.ApplyTemplateRequest{Namespace: string(k.Namespace), Name: string(k.Name), Spec: nodeconv.FromTemplateSpec(spec)}
	for _, uid := range owner {
		ask.Owner = string(uid)
	}
	if err := s.needsIf(ctx, ask.Owner != "", "owners"); err != nil {
		return sandbox.Template{}, err
	}
	return read(ctx, toTemplate)(s.node.ApplyTemplate(ctx, ask))
}

// Template implements server.Service.
func (s *Service) Template(ctx context.Context, k sandbox.Key) (sandbox.Template, error) {
	return read(ctx, toTemplate)(s.node.GetTemplate(ctx, &nodev1.GetTemplateRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// Templates implements server.Service.
func (s *Service) Templates(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Template, error) {
	all, err := s.all(ctx, n)
	if err != nil {
		return nil, err
	}
	return list(ctx, p, func(limit uint32, after string) ([]*nodev1.Template, string, error) {
		r, err := s.node.ListTemplates(ctx, &nodev1.ListTemplatesRequest{Namespace: string(n), AllNamespaces: all, Limit: limit, After: after})
		return r.GetTemplates(), r.GetNext(), err
	}, toTemplate)
}

// Builds implements server.Service.
func (s *Service) Builds(ctx context.Context, t sandbox.Template) ([]sandbox.Build, error) {
	got, err := s.node.GetTemplate(ctx, &nodev1.GetTemplateRequest{Namespace: string(t.Namespace), Name: string(t.Name)})
	if err != nil {
		if err = problem(ctx, err); sandbox.HasCode(err, sandbox.CodeNotFound) {
			err = nil // it was deleted, and its builds with it
		}
		return nil, err
	}
	now, builds, err := nodeconv.ToTemplate(got)
	if err != nil || now.Revision != t.Revision {
		return nil, err
	}
	return builds, nil
}

// DeleteTemplate implements server.Service.
func (s *Service) DeleteTemplate(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error {
	p, err := s.precondition(ctx, when)
	if err != nil {
		return err
	}
	return done(ctx)(s.node.DeleteTemplate(ctx, &nodev1.DeleteTemplateRequest{Namespace: string(k.Namespace), Name: string(k.Name), Precondition: p}))
}

// done is for calls whose answer is empty.
func done(ctx context.Context) func(any, error) error {
	return func(_ any, err error) error {
		if err != nil {
			return problem(ctx, err)
		}
		return nil
	}
}

// ApplyPool implements server.Service.
func (s *Service) ApplyPool(ctx context.Context, k sandbox.Key, spec sandbox.PoolSpec, owner ...sandbox.UID) (sandbox.Pool, error) {
	ask := &nodev1.ApplyPoolRequest{Namespace: string(k.Namespace), Name: string(k.Name), Spec: nodeconv.FromPoolSpec(spec)}
	for _, uid := range owner {
		ask.Owner = string(uid)
	}
	if err := s.needsIf(ctx, ask.Owner != "", "owners"); err != nil {
		return sandbox.Pool{}, err
	}
	return read(ctx, toPool)(s.node.ApplyPool(ctx, ask))
}

// Pool implements server.Service.
func (s *Service) Pool(ctx context.Context, k sandbox.Key) (sandbox.Pool, sandbox.PoolStatus, error) {
	got, err := s.node.GetPool(ctx, &nodev1.GetPoolRequest{Namespace: string(k.Namespace), Name: string(k.Name)})
	if err != nil {
		return sandbox.Pool{}, sandbox.PoolStatus{}, problem(ctx, err)
	}
	return nodeconv.ToPool(got)
}

// Pools implements server.Service.
func (s *Service) Pools(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Pool, error) {
	all, err := s.all(ctx, n)
	if err != nil {
		return nil, err
	}
	return list(ctx, p, func(limit uint32, after string) ([]*nodev1.Pool, string, error) {
		r, err := s.node.ListPools(ctx, &nodev1.ListPoolsRequest{Namespace: string(n), AllNamespaces: all, Limit: limit, After: after})
		return r.GetPools(), r.GetNext(), err
	}, toPool)
}

// DeletePool implements server.Service.
func (s *Service) DeletePool(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error {
	p, err := s.precondition(ctx, when)
	if err != nil {
		return err
	}
	return done(ctx)(s.node.DeletePool(ctx, &nodev1.DeletePoolRequest{Namespace: string(k.Namespace), Name: string(k.Name), Precondition: p}))
}

// Fork implements server.Service.
func (s *Service) Fork(ctx context.Context, r sandbox.ForkRequest) (sandbox.Fork, bool, error) {
	p, err := s.precondition(ctx, []sandbox.Precondition{r.When})
	if err != nil {
		return sandbox.Fork{}, false, err
	}
	identity, err := s.identity(ctx, r.Once)
	if err != nil {
		return sandbox.Fork{}, false, err
	}
	if err := s.needsIf(ctx, r.Spec.Atomic || len(r.Spec.Children) > 0 || r.Spec.Checkpoint != "", "fork-children"); err != nil {
		return sandbox.Fork{}, false, err
	}
	ask := nodeconv.FromForkSpec(r.Spec)
	ask.Precondition, ask.Identity = p, identity
	ask.Namespace, ask.Name = string(r.Namespace), string(r.Name)
	var header metadata.MD
	f, err := read(ctx, nodeconv.ToFork)(s.node.ForkSandbox(ctx, ask, grpc.Header(&header)))
	return f, replayed(header), err
}

// ForkOf implements server.Service.
func (s *Service) ForkOf(ctx context.Context, k sandbox.Key) (sandbox.Fork, error) {
	return read(ctx, nodeconv.ToFork)(s.node.GetFork(ctx, &nodev1.GetForkRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// Forks implements server.Service.
func (s *Service) Forks(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.Fork, error) {
	all, err := s.all(ctx, n)
	if err != nil {
		return nil, err
	}
	return list(ctx, p, func(limit uint32, after string) ([]*nodev1.Fork, string, error) {
		r, err := s.node.ListForks(ctx, &nodev1.ListForksRequest{Namespace: string(n), AllNamespaces: all, Limit: limit, After: after})
		return r.GetForks(), r.GetNext(), err
	}, nodeconv.ToFork)
}

// DeleteFork implements server.Service.
func (s *Service) DeleteFork(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error {
	p, err := s.precondition(ctx, when)
	if err != nil {
		return err
	}
	return done(ctx)(s.node.DeleteFork(ctx, &nodev1.DeleteForkRequest{Namespace: string(k.Namespace), Name: string(k.Name), Precondition: p}))
}

// Checkpoint implements server.Service.
func (s *Service) Checkpoint(ctx context.Context, r sandbox.CheckpointRequest) (sandbox.CheckpointSize, bool, error) {
	p, err := s.precondition(ctx, []sandbox.Precondition{r.When})
	if err != nil {
		return sandbox.CheckpointSize{}, false, err
	}
	identity, err := s.identity(ctx, r.Once)
	if err != nil {
		return sandbox.CheckpointSize{}, false, err
	}
	var header metadata.MD
	c, err := read(ctx, nodeconv.ToCheckpoint)(s.node.CheckpointSandbox(ctx, &nodev1.CheckpointSandboxRequest{
		Namespace: string(r.Namespace), Name: string(r.Name), Source: string(r.Source), Precondition: p, Identity: identity,
	}, grpc.Header(&header)))
	return c, replayed(header), err
}

// CheckpointOf implements server.Service.
func (s *Service) CheckpointOf(ctx context.Context, k sandbox.Key) (sandbox.CheckpointSize, error) {
	return read(ctx, nodeconv.ToCheckpoint)(s.node.GetCheckpoint(ctx, &nodev1.GetCheckpointRequest{Namespace: string(k.Namespace), Name: string(k.Name)}))
}

// Checkpoints implements server.Service.
func (s *Service) Checkpoints(ctx context.Context, n sandbox.Namespace, p sandbox.Page) ([]sandbox.CheckpointSize, error) {
	all, err := s.all(ctx, n)
	if err != nil {
		return nil, err
	}
	return list(ctx, p, func(limit uint32, after string) ([]*nodev1.Checkpoint, string, error) {
		r, err := s.node.ListCheckpoints(ctx, &nodev1.ListCheckpointsRequest{Namespace: string(n), AllNamespaces: all, Limit: limit, After: after})
		return r.GetCheckpoints(), r.GetNext(), err
	}, nodeconv.ToCheckpoint)
}

// DeleteCheckpoint implements server.Service.
func (s *Service) DeleteCheckpoint(ctx context.Context, k sandbox.Key, when ...sandbox.Precondition) error {
	p, err := s.precondition(ctx, when)
	if err != nil {
		return err
	}
	return done(ctx)(s.node.DeleteCheckpoint(ctx, &nodev1.DeleteCheckpointRequest{Namespace: string(k.Namespace), Name: string(k.Name), Precondition: p}))
}

// Restore implements server.Service.
func (s *Service) Restore(ctx context.Context, r sandbox.RestoreRequest) (sandbox.Sandbox, bool, error) {
	identity, err := s.identity(ctx, r.Once)
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if err := s.needsIf(ctx, !r.Spec.Expires.IsZero(), "expires"); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	ask := nodeconv.FromRestoreSpec(r.Spec)
	ask.Namespace, ask.Name, ask.Checkpoint = string(r.Namespace), string(r.Name), string(r.Checkpoint)
	ask.Identity = identity
	var header metadata.MD
	made, err := read(ctx, nodeconv.ToSandbox)(s.node.RestoreCheckpoint(ctx, ask, grpc.Header(&header)))
	return made, replayed(header), err
}
