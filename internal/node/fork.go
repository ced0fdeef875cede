package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// Fork makes sandboxes that continue from a running one, all from the same
// instant, named <fork>-1 to <fork>-n. One that is paused or hibernated goes on
// first. Each child has its own outcome; the error is that of all.
func (m *Manager) Fork(ctx context.Context, r sandbox.ForkRequest) (f sandbox.Fork, replayed bool, err error) {
	f, replayed, err = doOnce(ctx, m, r.Once, forkIn, func(also record[sandbox.Fork]) (sandbox.Fork, error) {
		return m.fork(ctx, r.Key, r.Spec, also)
	})
	if !replayed {
		return f, false, err
	}
	// An answer that is kept has no resource version.
	if now, nowErr := m.ForkOf(ctx, f.Key); nowErr == nil && now.Created.Equal(f.Created) {
		f = now
	}
	return f, true, err
}

func (m *Manager) fork(ctx context.Context, k sandbox.Key, spec sandbox.ForkSpec, also record[sandbox.Fork]) (f sandbox.Fork, err error) {
	if err := m.beginMaking(); err != nil {
		return f, err
	}
	if err := errors.Join(spec.Validate(), m.cordon.admit(false)); err != nil {
		return f, err
	}
	source, n := spec.Source, spec.Replicas
	if _, err := sandbox.ParseName(childName(k.Name, n)); err != nil {
		return f, err
	}
	f = sandbox.Fork{Key: k, Source: source, Replicas: n, Phase: sandbox.PhasePending, Created: time.Now().UTC()}
	_, err = m.with(ctx, sandbox.Key{Namespace: k.Namespace, Name: source}, func(ctx context.Context, b *member) error {
		last := b.now()
		if err := m.mayCopy(ctx, last, "fork"); err != nil {
			return err
		}
		if err := b.resume(ctx); err != nil {
			return err
		}
		release, err := m.captureTurns.take(ctx, k.Namespace)
		if err != nil {
			return fmt.Errorf("fork sandbox %s: %w", source, err)
		}
		defer release()
		f.SourceID, f.By, f.HoldsSecrets = b.id, sandbox.PrincipalOf(ctx), last.HoldsSecrets()
		if err := m.enlistFork(f); err != nil {
			return err
		}
		if err := m.forkMember(ctx, b, &f, spec.NetworkPolicy); err != nil {
			return errors.Join(err, m.db.Update(func(tx *journal.Tx) error { return forks.Delete(tx, k.String()) }))
		}
		f.Phase = sandbox.PhaseReady
		for _, c := range f.Children {
			if c.Problem != "" {
				f.Phase = sandbox.PhaseFailed
			}
		}
		return m.db.Update(func(tx *journal.Tx) error {
			return errors.Join(forks.Write(tx, k.String(), &f), also.write(tx, f))
		})
	})
	if err == nil {
		m.noteFork()
	}
	return f, err
}

func childName(fork sandbox.Name, n int) string { return string(fork) + "-" + strconv.Itoa(n) }

func (m *Manager) enlistFork(f sandbox.Fork) error {
	return m.db.Update(func(tx *journal.Tx) error {
		if _, found, err := forks.Get(tx, f.String()); err != nil {
			return err
		} else if found {
			return sandbox.Errorf(sandbox.CodeExists, "fork %s exists already in namespace %s", f.Name, f.Namespace).
				Try("Choose another name")
		}
		return forks.Put(tx, f.String(), f)
	})
}

// forkMember forks a sandbox whose turn it is.
func (m *Manager) forkMember(ctx context.Context, b *member, f *sandbox.Fork, narrow *policy.Policy) (err error) {
	last := b.now()
	capture, err := b.beginCapture()
	if err != nil {
		return err
	}
	egress, err := last.Egress.Narrowed(narrow)
	if err != nil {
		return errors.Join(err, b.endCapture(last.Live))
	}
	// What the fork has left in memory is that, until it is known to be less.
	held := append(slices.Clone(last.Live), capture)
	defer func() { err = errors.Join(err, b.endCapture(held)) }()
	f.Children = make([]sandbox.ForkOutcome, f.Replicas)
	var children []*child
	var refused error
	for i := range f.Children {
		out := &f.Children[i]
		out.Name = sandbox.Name(childName(f.Name, i+1))
		c, err := m.enlistChild(last, egress, f.Name, out)
		if err != nil {
			out.Problem = err.Error()
			refused = cmp.Or(refused, err)
			continue
		}
		children = append(children, c)
	}
	if len(children) == 0 {
		held = last.Live
		return fmt.Errorf("none of the forks of %s could be made: %w", last.Name, refused)
	}
	opts := make([]engine.ForkOptions, len(children))
	for i, c := range children {
		opts[i] = engine.ForkOptions{
			Hostname: string(c.out.Name), Folder: m.machineDir(c.machine), Limits: engineLimits(last.Limits),
			Turn: func(ctx context.Context) (func(), error) { return m.turns.take(ctx, last.Namespace) },
		}
	}
	var out sandbox.Outcome
	ctx, end := m.observer.Begin(ctx, last.Work(sandbox.OpLiveFork))
	defer func() {
		out.Err = err
		end(out)
	}()
	live, err := b.machine.Fork(ctx, opts)
	if err != nil {
		if held = last.Live; live != nil && !live.Same {
			held = fromHeld(live.Source)
		}
		err = fmt.Errorf("fork sandbox %s: %w", last.Name, err)
		for _, c := range children {
			err = errors.Join(err, c.drop(m))
		}
		return err
	}
	f.Pause, out.Live, held = live.Stats.Pause, fromLiveFork(live.Stats), fromHeld(live.Source)
	if live.Same {
		held = last.Live
	}
	var errs []error
	for i, c := range children {
		if live.Errs[i] == nil {
			live.Errs[i] = c.begin(ctx, m, live.Forks[i], fromHeld(live.Held), captured(b.machine))
		}
		if live.Errs[i] != nil {
			c.out.Problem = live.Errs[i].Error()
			errs = append(errs, c.drop(m))
			out.Failed++
			continue
		}
		c.out.ID = c.id
		out.Children++
	}
	return errors.Join(errs...)
}

// child is a fork in the making.
type child struct {
	*member
	out     *sandbox.ForkOutcome
	machine sandbox.ID
	memory  uint64
	layers  []sandbox.Held
}

// enlistChild takes what a child needs before it is made.
func (m *Manager) enlistChild(source sandbox.Sandbox, egress sandbox.Egress, fork sandbox.Name, out *sandbox.ForkOutcome) (*child, error) {
	c := &child{out: out, machine: sandbox.NewID(), memory: source.Memory}
	c.layers = heldFor(source.Layers, string(c.machine))
	if err := m.reserve(source.Namespace, source.Memory, c.layers...); err != nil {
		return nil, err
	}
	s := source.Child(out.Name)
	s.Fork, s.Egress = fork, egress
	err := os.Mkdir(m.machineDir(c.machine), 0o700)
	if err == nil {
		c.member, err = m.enlist(s)
	}
	if err != nil {
		m.capacity.release(source.Namespace, source.Memory, c.layers...)
		return nil, errors.Join(err, m.cfg.Engine.Remove(m.ctx, m.machineDir(c.machine)))
	}
	return c, nil
}

// begin makes a child of what runs, and holds what was captured.
func (c *child) begin(ctx context.Context, m *Manager, sb engine.Sandbox, live []sandbox.Held, lineage *sandbox.Lineage) error {
	namespace := c.now().Namespace
	connected, err := m.joinMember(ctx, c.now(), c.machine, sb, lineage)
	if err != nil {
		return errors.Join(fmt.Errorf("connect sandbox %s: %w", c.now().Name, err), sb.Close())
	}
	m.capacity.take(namespace, 0, live...)
	err = c.change(func(s *sandbox.Sandbox) {
		s.State, s.Machine, s.Boot = sandbox.Running, c.machine, m.cfg.Boot
		s.Layers, s.Live = c.layers, live
		s.Clock.Start(time.Now())
	})
	if err != nil {
		m.capacity.release(namespace, 0, live...)
		return errors.Join(err, connected.Close())
	}
	c.attach(connected)
	c.unlock()
	return nil
}

// drop undoes enlistChild.
func (c *child) drop(m *Manager) error {
	m.capacity.release(c.now().Namespace, c.memory, c.layers...)
	return errors.Join(c.forget(), m.cfg.Engine.Remove(m.ctx, m.machineDir(c.machine)))
}
