package node

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// A cordoned node makes no sandboxes, and fills no pools. A drained node also ends the
// sandboxes that wait in pools, hibernates the running ones, and wakes no sandbox. The
// journal records both, so the next daemon goes on with them.

var cordons = journal.Collection[sandbox.Cordon]("cordon")

// drains is how many sandboxes are hibernated at once. drainAgain is the pause before
// those that could not be hibernated are tried again.
const (
	drains     = 4
	drainAgain = 10 * time.Second
)

// These bound how many problems of a drain are shown, and the bytes of each: they are part of
// each message about the node.
const (
	shownProblems   = 1000
	maxDrainProblem = 512
)

// cordon is the reason why the node accepts no new sandboxes, if it is
// cordoned.
type cordon struct {
	mu  sync.Mutex // protects all following fields
	now *sandbox.Cordon
	// changed is closed and made anew with each change.
	changed  chan struct{}
	problems map[sandbox.Key]string // of a drain
}

// get returns the cordon, nil if the node is not cordoned.
func (c *cordon) get() (now *sandbox.Cordon, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now, c.changed
}

func (c *cordon) set(now *sandbox.Cordon) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now, c.problems = now, map[sandbox.Key]string{}
	close(c.changed)
	c.changed = make(chan struct{})
}

// blame records why a sandbox was not hibernated. An empty problem removes the
// record.
func (c *cordon) blame(k sandbox.Key, problem string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if delete(c.problems, k); problem != "" {
		c.problems[k] = strings.ToValidUTF8(problem[:min(len(problem), maxDrainProblem)], "")
	}
}

// forgive forgets the problems of sandboxes that no longer run.
func (c *cordon) forgive(running map[sandbox.Key]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.problems, func(k sandbox.Key, _ string) bool { return !running[k] })
}

// shown returns the cordon with its progress.
func (c *cordon) shown(left int) *sandbox.Cordon {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now == nil {
		return nil
	}
	out := *c.now
	if out.Drain {
		out.Left = left
	}
	for k, problem := range c.problems {
		out.Problems = append(out.Problems, sandbox.DrainProblem{Key: k, Problem: problem})
	}
	slices.SortFunc(out.Problems, func(a, b sandbox.DrainProblem) int { return strings.Compare(a.String(), b.String()) })
	out.Problems = out.Problems[:min(len(out.Problems), shownProblems)]
	return &out
}

// admit refuses to make a sandbox. With wakes it is asked for a sandbox that
// only wakes up.
func (c *cordon) admit(wakes bool) error {
	now, _ := c.get()
	if now == nil || wakes && !now.Drain {
		return nil
	}
	what := "cordoned"
	if now.Drain {
		what = "being drained"
	}
	e := sandbox.Errorf(sandbox.CodeCordoned, "the node is %s", what)
	if now.By != "" {
		e = e.Because("%s has asked for it at %s", now.By, now.Since.Format(time.RFC3339))
	}
	return e.Try("Use another node, or end that with `agentrun uncordon`")
}

// wait waits until sandboxes may be made.
func (c *cordon) wait(ctx context.Context) error {
	for {
		now, changed := c.get()
		if now == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Cordon stops the node from making sandboxes. With drain it also hibernates the
// running ones.
func (m *Manager) Cordon(ctx context.Context, drain bool) (sandbox.NodeStatus, error) {
	if err := m.begin(); err != nil {
		return sandbox.NodeStatus{}, err
	}
	next := sandbox.Cordon{Since: time.Now().UTC(), By: sandbox.PrincipalOf(ctx), Drain: drain}
	return m.setCordon(ctx, &next)
}

// Uncordon ends the cordon. Hibernated sandboxes stay so until they are used.
func (m *Manager) Uncordon(ctx context.Context) (sandbox.NodeStatus, error) {
	if err := m.begin(); err != nil {
		return sandbox.NodeStatus{}, err
	}
	return m.setCordon(ctx, nil)
}

// setCordon writes a cordon, nil to end it, and then applies it. A cordon that is in force
// already stays unchanged.
func (m *Manager) setCordon(ctx context.Context, next *sandbox.Cordon) (sandbox.NodeStatus, error) {
	m.cordonTurn.Lock()
	defer m.cordonTurn.Unlock()
	now, _ := m.cordon.get()
	same := now == nil && next == nil || now != nil && next != nil && now.Drain == next.Drain
	if !same {
		err := m.db.Update(func(tx *journal.Tx) error {
			if next == nil {
				return cordons.Delete(tx, nodeKey)
			}
			return cordons.Put(tx, nodeKey, *next)
		})
		if err != nil {
			return sandbox.NodeStatus{}, err
		}
		m.cordon.set(next)
		m.noticePools()
	}
	return m.Node(ctx)
}

// recoverCordon reads the cordon that an earlier daemon has recorded.
func (m *Manager) recoverCordon() error {
	return m.db.View(func(tx *journal.Tx) error {
		c, found, err := cordons.Get(tx, nodeKey)
		if found {
			m.cordon.set(&c)
		}
		return err
	})
}

// draining reports whether all sandboxes of the node are to stop running.
func (m *Manager) draining() bool {
	now, _ := m.cordon.get()
	return now != nil && now.Drain
}

// drain hibernates the running sandboxes while the node is drained.
func (m *Manager) drain() {
	for {
		now, changed := m.cordon.get()
		var again <-chan time.Time
		if now != nil && now.Drain {
			ctx, cancel := context.WithCancel(m.ctx)
			go func() {
				select {
				case <-changed:
				case <-ctx.Done():
				}
				cancel()
			}()
			m.hibernateAll(ctx)
			cancel()
			// A sandbox that was being made when the drain began may run by
			// now.
			again = time.After(drainAgain)
		}
		select {
		case <-changed:
		case <-again:
		case <-m.ctx.Done():
			return
		}
	}
}

// hibernateAll hibernates the running sandboxes, some of them at once.
func (m *Manager) hibernateAll(ctx context.Context) {
	running := map[sandbox.Key]bool{}
	left := slices.DeleteFunc(m.members(), func(b *member) bool {
		is := runs(b.latest().State)
		if is {
			running[b.key] = true
		}
		return !is
	})
	m.cordon.forgive(running)
	m.noticeStatus()
	slots := make(chan struct{}, drains)
	var all sync.WaitGroup
	for _, b := range left {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			all.Wait()
			return
		}
		all.Go(func() {
			defer func() { <-slots }()
			_, err := m.Hibernate(sandbox.WithOwning(ctx), b.key)
			switch {
			case ctx.Err() != nil:
				return
			case err == nil, sandbox.HasCode(err, sandbox.CodeEnded), sandbox.HasCode(err, sandbox.CodeNotFound):
				m.cordon.blame(b.key, "")
			default:
				m.cordon.blame(b.key, err.Error())
			}
			m.noticeStatus()
		})
	}
	all.Wait()
}

// runs reports whether a sandbox in a state has a machine that a drain has to
// end.
func runs(s sandbox.State) bool {
	return s == sandbox.Running || s == sandbox.Paused || s == sandbox.Hibernating || s == sandbox.Resuming
}

// identify sets the node's name: the configured one, or one that is made up
// once.
func (m *Manager) identify() error {
	if m.cfg.NodeID != "" {
		m.id = m.cfg.NodeID
		return nil
	}
	return m.db.Update(func(tx *journal.Tx) error {
		made, found, err := identities.Get(tx, nodeKey)
		if err == nil && !found {
			made = "node-" + string(sandbox.NewID()[:10])
			err = identities.Put(tx, nodeKey, made)
		}
		m.id = made
		return err
	})
}

// identities contains the node's name if it was made up.
var identities = journal.Collection[string]("identity")
