package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// Claim makes a sandbox of a pool. It returns when the sandbox has answered.
func (m *Manager) Claim(ctx context.Context, r sandbox.ClaimRequest) (s sandbox.Sandbox, replayed bool, err error) {
	if err := errors.Join(r.Validate(), sandbox.MayGive(ctx, r.Owner)); err != nil {
		return s, false, err
	}
	if r.Owner != "" {
		return m.claimOwned(ctx, r)
	}
	s, replayed, err = doOnce(ctx, m, r.Once, sandboxIn, func(also record[sandbox.Sandbox]) (sandbox.Sandbox, error) {
		return m.claim(ctx, r, also)
	})
	if replayed {
		s, err = m.present(s)
	}
	return s, replayed, err
}

func (m *Manager) claim(ctx context.Context, r sandbox.ClaimRequest, also record[sandbox.Sandbox]) (_ sandbox.Sandbox, err error) {
	k, spec := r.Key, r.Spec
	if err := m.beginMaking(); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := errors.Join(spec.Validate(), sandbox.CheckExpiry(spec.Expires, time.Now())); err != nil {
		return sandbox.Sandbox{}, err
	}
	m.mu.Lock()
	p := m.pools[sandbox.Key{Namespace: k.Namespace, Name: spec.Pool}]
	m.mu.Unlock()
	if p == nil {
		return sandbox.Sandbox{}, sandbox.NotFound(sandbox.KindPool, sandbox.Key{Namespace: k.Namespace, Name: spec.Pool})
	}
	// This comes after the pool is found, because a name without a pool must
	// not be counted.
	var out sandbox.Outcome
	ctx, end := m.observer.Begin(ctx, sandbox.Work{Op: sandbox.OpClaim, Pool: p.key})
	defer func() {
		out.Err = err
		end(out)
	}()
	secrets, err := m.claimSecrets(r)
	if err == nil {
		err = p.mayInject(k.Namespace, spec.Secrets)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	b, err := m.enlist(sandbox.Sandbox{
		Key: k, Pool: spec.Pool, Engine: m.cfg.Engine.Name(), Metadata: spec.Metadata, Lifetime: spec.Lifetime,
		Owner: r.Owner, Token: r.Token,
	})
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	fits := func(of *stock) bool { return m.checkInject(k.Namespace, of, spec.Secrets) == nil }
	machine, from, err := p.claim(ctx, string(k.Name), fits)
	if err != nil {
		return sandbox.Sandbox{}, errors.Join(err, b.forget())
	}
	out.Waited = machine.waited
	egress := sandbox.EgressOf(from.policy.Load(), spec.NetworkPolicy)
	var connected engine.Sandbox
	if err = m.checkInject(k.Namespace, from, spec.Secrets); err == nil { // the stock may have another revision
		connected, err = m.connectClaimed(ctx, sandbox.Sandbox{
			Key: k, Egress: egress, Secrets: spec.Secrets, TrustedCA: from.build.TrustedCA,
		}, machine, from.build.Lineage)
	}
	if err != nil {
		return sandbox.Sandbox{}, errors.Join(fmt.Errorf("connect sandbox %s: %w", k.Name, err), b.forget(), machine.Close())
	}
	env := merge(from.build.Env, spec.Env)
	if len(spec.Env)+len(secrets) > 0 { // the template's variables are there already
		if err := setEnv(ctx, machine, merge(env, secrets)); err != nil {
			return sandbox.Sandbox{}, errors.Join(fmt.Errorf("set the environment of sandbox %s: %w", k.Name, err), b.forget(), machine.Close())
		}
	}
	err = b.changeAnd(func(s *sandbox.Sandbox) {
		s.State, s.Machine, s.Boot, s.Memory, s.Layers = sandbox.Running, machine.id, m.cfg.Boot, machine.memory, machine.held
		s.Template, s.Revision, s.Limits = from.build.Template.Name, from.build.Revision, limitsOf(from.spec)
		s.Workdir, s.User, s.Env, s.Egress = from.build.Workdir, from.build.User, env, egress
		s.TrustedCA = from.build.TrustedCA
		if len(secrets) > 0 {
			s.Secrets, s.SecretsBy = spec.Secrets, sandbox.PrincipalOf(ctx)
			s.Given = slices.Sorted(maps.Keys(r.Values))
		}
		s.Clock.Start(time.Now())
	}, also)
	if err != nil {
		return sandbox.Sandbox{}, errors.Join(err, b.forget(), machine.Close())
	}
	b.attach(connected)
	m.unpark(machine.id)
	b.unlock()
	m.noteInject(ctx, b.now())
	return b.now(), nil
}

// connectClaimed connects a machine that was claimed. From then on the machine's
// Close also leaves the network.
func (m *Manager) connectClaimed(ctx context.Context, s sandbox.Sandbox, machine *parked, lineage *sandbox.Lineage) (engine.Sandbox, error) {
	if err := s.Egress.CheckOwn(s.Egress.Own); err != nil {
		return nil, err
	}
	connected, err := m.joinMember(ctx, s, machine.id, machine.Sandbox, lineage)
	machine.connected = connected
	return connected, err
}

// setEnv gives a machine its environment. From then on the agent keeps it, also
// in the forks and images of the machine. So no later daemon needs to know it.
func setEnv(ctx context.Context, machine engine.Sandbox, env sandbox.Env) error {
	if err := env.CheckSize(); err != nil {
		return err
	}
	return machine.Agent().SetEnv(ctx, guestrpc.SetEnvRequest{Env: env.Strings()})
}

// merge returns the variables of both; those of above win.
func merge(below, above sandbox.Env) sandbox.Env {
	if len(below) == 0 {
		return above
	}
	out := maps.Clone(below)
	maps.Copy(out, above)
	return out
}

// enlist begins a sandbox: its name is taken, its intent is in the journal, and
// the caller has its turn.
func (m *Manager) enlist(s sandbox.Sandbox) (*member, error) {
	s.ID, s.State, s.Created = m.cfg.Codes.NewID(), sandbox.Starting, time.Now().UTC()
	if !s.Expires.IsZero() {
		s.Expires = s.Expires.UTC() // wall clock time, as in the journal
	}
	b := m.newMember(s)
	<-b.turn
	if err := m.takeName(b); err != nil {
		return nil, err
	}
	if err := m.db.Update(func(tx *journal.Tx) error { return sandboxes.Put(tx, string(s.ID), s) }); err != nil {
		b.leave()
		if m.ctx.Err() != nil {
			return nil, errClosing() // the journal may be closed
		}
		return nil, fmt.Errorf("sandbox %s: %w", s.Name, err)
	}
	return b, nil
}

// takeName takes a sandbox's name, and its place in the quota of its namespace, before
// the sandbox is in the journal. So other calls do not wait for the journal.
func (m *Manager) takeName(b *member) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosing()
	}
	if err := m.cordon.admit(false); err != nil {
		return err
	}
	if m.roster.get(b.key) != nil {
		return sandbox.Errorf(sandbox.CodeExists, "sandbox %s exists already in namespace %s", b.key.Name, b.key.Namespace).
			Try("Choose another name, or end it with `agentrun kill %s`", b.key.Name)
	}
	if err := errors.Join(m.admit(b.key.Namespace), m.roster.mayTake(b.record.Token)); err != nil {
		return err
	}
	m.roster.add(b)
	return nil
}

// leave gives back the name of a sandbox that failed to start. The caller has the
// turn, and passes it to callers that have found the sandbox in the meantime.
func (b *member) leave() {
	m := b.manager
	m.mu.Lock()
	m.roster.remove(b)
	m.mu.Unlock()
	b.mu.Lock()
	left := *b.record
	left.State = sandbox.Ended
	b.record = &left
	b.mu.Unlock()
	b.unlock()
}

// forget undoes enlist, as if the sandbox had never existed.
func (b *member) forget() error {
	m := b.manager
	b.leave()
	err := m.db.Update(func(tx *journal.Tx) error { return sandboxes.Delete(tx, string(b.id)) })
	if m.ctx.Err() != nil {
		err = nil // the journal may be closed: the next daemon forgets the sandbox
	}
	return err
}
