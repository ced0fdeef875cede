package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// Fork makes sandboxes that continue from a running one, all from the same instant. They are
// named <fork>-1 to <fork>-n unless the spec names them. A paused or hibernated source is
// resumed first. If the fork also makes a checkpoint, the source stays as it is, and the
// children are made from the checkpoint. The failure of one child
// is in its outcome, and an error means that the whole fork has failed. If the fork is atomic,
// it makes all children or fails without any.
func (m *Manager) Fork(ctx context.Context, r sandbox.ForkRequest) (f sandbox.Fork, replayed bool, err error) {
	if r.Spec.Owned() {
		return m.forkOwned(ctx, r)
	}
	f, replayed, err = doOnce(ctx, m, r.Once, forkIn, func(also record[sandbox.Fork]) (sandbox.Fork, error) {
		return m.fork(ctx, r, nil, also)
	})
	if !replayed {
		return f, false, err
	}
	// A kept answer has no resource version.
	if now, nowErr := m.ForkOf(ctx, f.Key); nowErr == nil && now.Created.Equal(f.Created) {
		f = now
	}
	return f, true, err
}

// fork is one attempt of Fork. asked has the digests of a request for children
// with owners.
func (m *Manager) fork(ctx context.Context, r sandbox.ForkRequest, asked map[string]string, also record[sandbox.Fork]) (f sandbox.Fork, err error) {
	k, spec := r.Key, r.Spec
	if err := m.beginMaking(); err != nil {
		return f, err
	}
	if err := errors.Join(spec.Validate(), m.cordon.admit(false)); err != nil {
		return f, err
	}
	if err := spec.ValidateAs(k.Name); err != nil {
		return f, err
	}
	source := spec.Source
	f = sandbox.Fork{Key: k, Source: source, Replicas: spec.Replicas, Phase: sandbox.PhasePending, Created: time.Now().UTC(), Checkpoint: spec.Checkpoint, Asked: asked}
	_, err = m.with(ctx, sandbox.Key{Namespace: k.Namespace, Name: source}, []sandbox.Precondition{r.When}, func(ctx context.Context, b *member) error {
		last := b.now()
		if err := m.mayCopy(ctx, last, "fork"); err != nil {
			return err
		}
		fork := m.forkThrough
		if spec.Checkpoint == "" {
			fork = m.forkMember
			if err := b.resume(ctx); err != nil {
				return err
			}
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
		if err := fork(ctx, b, &f, spec, also); err != nil {
			return errors.Join(err, m.forgetFork(f))
		}
		return nil
	})
	if err == nil {
		m.noteFork()
	}
	return f, err
}

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

// pendingFork fails if a fork was deleted while it was being made.
func pendingFork(tx *journal.Tx, f sandbox.Fork) error {
	now, found, err := forks.Get(tx, f.String())
	if err == nil && (!found || now.SourceID != f.SourceID || !now.Created.Equal(f.Created)) {
		err = sandbox.Errorf(sandbox.CodeConflict, "fork %s was deleted while it was being made", f.Name)
	}
	return err
}

// forgetFork undoes enlistFork.
func (m *Manager) forgetFork(f sandbox.Fork) error {
	return m.db.Update(func(tx *journal.Tx) error {
		err := pendingFork(tx, f)
		if sandbox.HasCode(err, sandbox.CodeConflict) {
			return nil // another fork may have the name by now
		}
		return errors.Join(err, forks.Delete(tx, f.String()))
	})
}

// forkMember forks a sandbox; the caller has its turn. One transaction writes the
// children that were made and the answer to the journal. So without an answer there are
// no children.
func (m *Manager) forkMember(ctx context.Context, b *member, f *sandbox.Fork, spec sandbox.ForkSpec, also record[sandbox.Fork]) (err error) {
	last := b.now()
	capture, err := b.beginCapture()
	if err != nil {
		return err
	}
	egress, err := last.Egress.Narrowed(spec.NetworkPolicy)
	if err != nil {
		return errors.Join(err, b.endCapture(last.Live, nil))
	}
	// The fork's leftover in memory counts in full until its real size is
	// known.
	held := append(slices.Clone(last.Live), capture)
	committed := false
	defer func() {
		if !committed {
			err = errors.Join(err, b.endCapture(held, nil))
		}
	}()
	children, refused := m.enlistChildren(last, egress, f, spec)
	if len(children) == 0 || refused != nil && spec.Atomic {
		held = last.Live
		m.dropChildren(children)
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
		m.dropChildren(children)
		return fmt.Errorf("fork sandbox %s: %w", last.Name, err)
	}
	f.Pause, out.Live, held = live.Stats.Pause, fromLiveFork(live.Stats), fromHeld(live.Source)
	if live.Same {
		held = last.Live
	}
	made, failed := m.connectChildren(ctx, children, live, captured(b.machine))
	out.Failed = len(children) - len(made)
	if err := m.settleFork(f, spec, made, failed); err != nil {
		return err
	}
	if err := m.commitFork(b, held, f, made, also); err != nil {
		m.dropChildren(made)
		return fmt.Errorf("fork sandbox %s: %w", last.Name, err)
	}
	committed = true
	for _, c := range made {
		c.attach(c.connected)
		c.unlock()
		out.Children++
	}
	return nil
}

// enlistChildren reserves the resources of a fork's children before they are made. It returns
// the children that got theirs, and the error of the first that did not.
func (m *Manager) enlistChildren(source sandbox.Sandbox, egress sandbox.Egress, f *sandbox.Fork, spec sandbox.ForkSpec) (children []*child, refused error) {
	f.Children = make([]sandbox.ForkOutcome, f.Replicas)
	for i := range f.Children {
		want, out := spec.Child(f.Name, i), &f.Children[i]
		out.Name, out.Owner = want.Name, want.Owner
		c, err := m.enlistChild(source, egress, f.Name, want, out)
		if err != nil {
			out.Problem = err.Error()
			if refused = cmp.Or(refused, err); spec.Atomic {
				return children, refused
			}
			continue
		}
		children = append(children, c)
	}
	return children, refused
}

// connectChildren connects the children whose machines were made. It returns those that are
// connected, and the error of the first that is not.
func (m *Manager) connectChildren(ctx context.Context, children []*child, live *engine.LiveFork, lineage *sandbox.Lineage) (made []*child, failed error) {
	for i, c := range children {
		if live.Errs[i] == nil {
			live.Errs[i] = c.connect(ctx, m, live.Forks[i], fromHeld(live.Held), lineage)
		}
		if live.Errs[i] != nil {
			c.out.Problem = live.Errs[i].Error()
			failed = cmp.Or(failed, live.Errs[i])
			m.dropChild(c)
			continue
		}
		c.out.ID = c.id
		made = append(made, c)
	}
	return made, failed
}

// settleFork decides the outcome of a fork. An atomic fork that lacks a child has failed,
// and all its children are removed.
func (m *Manager) settleFork(f *sandbox.Fork, spec sandbox.ForkSpec, made []*child, failed error) error {
	if f.Phase = sandbox.PhaseReady; len(made) < len(f.Children) {
		f.Phase = sandbox.PhaseFailed
	}
	if failed != nil && spec.Atomic {
		m.dropChildren(made)
		return fmt.Errorf("none of the forks of %s are there: %w", f.Source, failed)
	}
	return nil
}

// commitFork writes the outcome of a fork, with the children that were made and the
// memory that their source holds from now on.
func (m *Manager) commitFork(b *member, held []sandbox.Held, f *sandbox.Fork, made []*child, also record[sandbox.Fork]) error {
	records := make([]sandbox.Sandbox, len(made))
	if err := b.endCapture(held, func(tx *journal.Tx, _ sandbox.Sandbox) error {
		if err := pendingFork(tx, *f); err != nil {
			return err
		}
		for i, c := range made {
			records[i] = c.running()
			if err := sandboxes.Write(tx, string(c.id), &records[i]); err != nil {
				return err
			}
			if c.out.Owner == "" {
				continue
			}
			asked, err := askedOfChild(*f, c.out.Name)
			if err = errors.Join(err, putOwner(tx, records[i], asked)); err != nil {
				return err
			}
		}
		return errors.Join(forks.Write(tx, f.String(), f), also.write(tx, *f))
	}); err != nil {
		return err
	}
	for i, c := range made {
		c.wrote(&records[i])
	}
	return nil
}

// child is a sandbox that a fork is making.
type child struct {
	*member
	out     *sandbox.ForkOutcome
	machine sandbox.ID
	memory  uint64
	layers  []sandbox.Held
	// live and connected are set once the child's machine was made.
	live      []sandbox.Held
	connected engine.Sandbox
}

// enlistChild reserves the resources of a child before it is made.
func (m *Manager) enlistChild(source sandbox.Sandbox, egress sandbox.Egress, fork sandbox.Name, want sandbox.ForkChild, out *sandbox.ForkOutcome) (*child, error) {
	if err := m.mayHave(source.Namespace, want.Owner); err != nil {
		return nil, err
	}
	c := &child{out: out, machine: sandbox.NewID(), memory: source.Memory}
	c.layers = heldFor(source.Layers, string(c.machine))
	if err := m.reserve(source.Namespace, source.Memory, c.layers...); err != nil {
		return nil, err
	}
	s := source.Child(out.Name)
	s.Fork, s.Egress, s.Owner, s.Token = fork, egress, want.Owner, want.Token
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

// connect gives the child its machine, and the memory that was captured for it.
func (c *child) connect(ctx context.Context, m *Manager, sb engine.Sandbox, live []sandbox.Held, lineage *sandbox.Lineage) error {
	connected, err := m.joinMember(ctx, c.now(), c.machine, sb, lineage)
	if err != nil {
		return errors.Join(fmt.Errorf("connect sandbox %s: %w", c.now().Name, err), sb.Close())
	}
	m.capacity.take(c.now().Namespace, 0, live...)
	c.live, c.connected = live, connected
	return nil
}

// running returns the record of a child whose machine was made.
func (c *child) running() sandbox.Sandbox {
	s := c.now()
	s.State, s.Machine, s.Boot = sandbox.Running, c.machine, c.manager.cfg.Boot
	s.Layers, s.Live = c.layers, c.live
	s.Clock.Start(time.Now())
	return s
}

// drop undoes enlistChild and connect.
func (c *child) drop(m *Manager) error {
	var err error
	if c.connected != nil {
		err = c.connected.Close()
		m.capacity.release(c.now().Namespace, 0, c.live...)
	}
	m.capacity.release(c.now().Namespace, c.memory, c.layers...)
	return errors.Join(err, c.forget(), m.cfg.Engine.Remove(m.ctx, m.machineDir(c.machine)))
}

func (m *Manager) dropChildren(all []*child) {
	for _, c := range all {
		m.dropChild(c)
	}
}

// dropChild drops a child whose caller returns a more important error. If the drop
// fails, it is only logged; the next daemon removes the rest.
func (m *Manager) dropChild(c *child) {
	if err := c.drop(m); err != nil {
		m.cfg.Log.Error("remove what is left of a child of a fork", "sandbox", c.id, "error", err)
	}
}
