package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
)

// maxFork is how many children a fork can have.
const maxFork = 1000

// Fork makes n sandboxes that continue from a running one, all from the same
// instant, named <fork>-1 to <fork>-n. One that is paused or hibernated goes on
// first. Each child has its own outcome; the error is that of all.
func (m *Manager) Fork(ctx context.Context, k Key, source Name, n int) (Fork, error) {
	return m.fork(ctx, k, source, n, nil)
}

func (m *Manager) fork(ctx context.Context, k Key, source Name, n int, also record[Fork]) (f Fork, err error) {
	if n < 1 || n > maxFork {
		return f, invalid("replicas", "%d is not between 1 and %d", n, maxFork)
	}
	if _, err := ParseName(childName(k.Name, n)); err != nil {
		return f, err
	}
	f = Fork{Key: k, Source: source, Replicas: n, Phase: PhasePending, Created: time.Now().UTC()}
	_, err = m.with(ctx, Key{k.Namespace, source}, func(b *member) error {
		last := b.now()
		if err := m.mayCopy(ctx, last, "fork"); err != nil {
			return err
		}
		if err := b.resume(ctx); err != nil {
			return err
		}
		f.SourceID, f.By, f.HoldsSecrets = b.id, principalOf(ctx), last.holdsSecrets()
		if err := m.enlistFork(f); err != nil {
			return err
		}
		if err := m.forkMember(ctx, b, &f); err != nil {
			return errors.Join(err, m.db.Update(func(tx *journal.Tx) error { return forks.Delete(tx, k.String()) }))
		}
		f.Phase = PhaseReady
		for _, c := range f.Children {
			if c.Problem != "" {
				f.Phase = PhaseFailed
			}
		}
		return m.db.Update(func(tx *journal.Tx) error {
			return errors.Join(forks.Put(tx, k.String(), f), also.write(tx, f))
		})
	})
	return f, err
}

func childName(fork Name, n int) string { return string(fork) + "-" + strconv.Itoa(n) }

func (m *Manager) enlistFork(f Fork) error {
	return m.db.Update(func(tx *journal.Tx) error {
		if _, found, err := forks.Get(tx, f.String()); err != nil {
			return err
		} else if found {
			return Errorf(CodeExists, "fork %s exists already in namespace %s", f.Name, f.Namespace).
				Try("Choose another name")
		}
		return forks.Put(tx, f.String(), f)
	})
}

// forkMember forks a sandbox whose turn it is.
func (m *Manager) forkMember(ctx context.Context, b *member, f *Fork) (err error) {
	last := b.now()
	capture, err := b.beginCapture()
	if err != nil {
		return err
	}
	// What the fork has left in memory is that, until it is known to be less.
	held := append(slices.Clone(last.Live), capture)
	defer func() { err = errors.Join(err, b.endCapture(held)) }()
	f.Children = make([]ForkOutcome, f.Replicas)
	var children []*child
	for i := range f.Children {
		out := &f.Children[i]
		out.Name = Name(childName(f.Name, i+1))
		c, err := m.enlistChild(last, f.Name, out)
		if err != nil {
			out.Problem = err.Error()
			continue
		}
		children = append(children, c)
	}
	if len(children) == 0 {
		held = last.Live
		return Errorf(CodeCapacity, "none of the forks of %s could be made", last.Name).Because("%s", f.Children[0].Problem)
	}
	opts := make([]engine.ForkOptions, len(children))
	for i, c := range children {
		opts[i] = engine.ForkOptions{
			Hostname: string(c.out.Name), Folder: m.machineDir(c.machine), Limits: last.Limits,
			Turn: func(ctx context.Context) (func(), error) { return m.turns.take(ctx, last.Namespace) },
		}
	}
	var out Outcome
	ctx, end := m.observer.Begin(ctx, last.work(OpLiveFork))
	defer func() {
		out.Err = err
		end(out)
	}()
	live, err := b.machine.Fork(ctx, opts)
	if err != nil {
		if held = last.Live; live != nil && !live.Same {
			held = live.Source
		}
		err = fmt.Errorf("fork sandbox %s: %w", last.Name, err)
		for _, c := range children {
			err = errors.Join(err, c.drop(m))
		}
		return err
	}
	f.Pause, out.Live, held = live.Stats.Pause, live.Stats, live.Source
	if live.Same {
		held = last.Live
	}
	var errs []error
	for i, c := range children {
		if live.Errs[i] == nil {
			live.Errs[i] = c.begin(m, live.Forks[i], live.Held)
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
	out     *ForkOutcome
	machine ID
	memory  uint64
	layers  []engine.Held
}

// enlistChild takes what a child needs before it is made.
func (m *Manager) enlistChild(source Sandbox, fork Name, out *ForkOutcome) (*child, error) {
	c := &child{out: out, machine: newID(), memory: source.Memory}
	c.layers = heldFor(source.Layers, string(c.machine))
	if err := m.reserve(source.Namespace, source.Memory, c.layers...); err != nil {
		return nil, err
	}
	s := source.child(out.Name)
	s.Fork = fork
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

// child is a sandbox that continues from s, before it has a machine.
func (s Sandbox) child(name Name) Sandbox {
	s.Parent, s.Name, s.Fork, s.Checkpoint = s.ID, name, "", ""
	s.Machine, s.Boot, s.Image, s.Clock = "", "", "", Clock{}
	s.Layers, s.Live, s.Kept = nil, nil, 0
	return s
}

// begin makes a child of what runs, and holds what was captured.
func (c *child) begin(m *Manager, sb engine.Sandbox, live []engine.Held) error {
	namespace := c.now().Namespace
	m.capacity.take(namespace, 0, live...)
	err := c.change(func(s *Sandbox) {
		s.State, s.Machine, s.Boot = Running, c.machine, m.cfg.Boot
		s.Layers, s.Live = c.layers, live
		s.Clock.start(time.Now())
	})
	if err != nil {
		m.capacity.release(namespace, 0, live...)
		return errors.Join(err, sb.Close())
	}
	c.attach(sb)
	c.unlock()
	return nil
}

// drop undoes enlistChild.
func (c *child) drop(m *Manager) error {
	m.capacity.release(c.now().Namespace, c.memory, c.layers...)
	return errors.Join(c.forget(), m.cfg.Engine.Remove(m.ctx, m.machineDir(c.machine)))
}
