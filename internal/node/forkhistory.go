package node

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// A fork is remembered while one of its children lives, and for keptForks after it was made,
// as long as its answer. Each namespace keeps at most historyForks forks without living
// children, with forkChildren children together.
const (
	keptForks    = keepAnswers
	historyForks = 1000
	forkChildren = 20_000
	// forksEvery is how often forks are forgotten, and forksAfter after how many new
	// forks.
	forksEvery = time.Hour
	forksAfter = 250
	// forksStep is how many forks one transaction reads or forgets.
	forksStep = 128
)

// forgetForks forgets forks and expired records of owners, from time to time.
func (m *Manager) forgetForks() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-m.forked:
		case <-m.ctx.Done():
			return
		}
		if err := m.forgetOldForks(time.Now()); err != nil && m.ctx.Err() == nil {
			m.cfg.Log.Error("forget forks whose children have ended", "error", err)
		}
		if err := m.forgetOverOwners(time.Now()); err != nil && m.ctx.Err() == nil {
			m.cfg.Log.Error("forget owners whose sandboxes ended long ago", "error", err)
		}
		timer.Reset(forksEvery)
	}
}

// noteFork counts a new fork.
func (m *Manager) noteFork() {
	if m.newForks.Add(1)%forksAfter != 0 {
		return
	}
	select {
	case m.forked <- struct{}{}:
	default:
	}
}

// pastFork is a fork without living children.
type pastFork struct {
	key      string
	created  time.Time
	children int
}

func (m *Manager) forgetOldForks(now time.Time) error {
	past := map[sandbox.Namespace][]pastFork{}
	for after, more := "", true; more; {
		var some []sandbox.Fork
		err := m.db.View(func(tx *journal.Tx) error {
			return forks.EachAfter(tx, "", after, func(_ string, f sandbox.Fork) error {
				if some = append(some, f); len(some) == forksStep {
					return errEnough
				}
				return nil
			})
		})
		if more = errors.Is(err, errEnough); err != nil && !more {
			return err
		}
		for _, f := range some {
			if after = f.String(); f.Phase != sandbox.PhasePending && !m.anyLives(f) {
				past[f.Namespace] = append(past[f.Namespace], pastFork{after, f.Created, len(f.Children)})
			}
		}
	}
	var old []pastFork
	for _, all := range past {
		old = append(old, surplusForks(all, now)...)
	}
	for step := range slices.Chunk(old, forksStep) {
		err := m.db.Update(func(tx *journal.Tx) error {
			var errs []error
			for _, p := range step {
				f, found, err := forks.Get(tx, p.key)
				if found && f.Created.Equal(p.created) { // otherwise it is a new fork
					err = forks.Delete(tx, p.key)
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// anyLives reports whether a child of a fork still lives.
func (m *Manager) anyLives(f sandbox.Fork) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(f.Children, func(c sandbox.ForkOutcome) bool { return c.ID != "" && m.roster.byID[c.ID] != nil })
}

// surplusForks returns the forks of a namespace to forget.
func surplusForks(all []pastFork, now time.Time) (old []pastFork) {
	slices.SortFunc(all, func(a, b pastFork) int { return cmp.Or(b.created.Compare(a.created), cmp.Compare(a.key, b.key)) })
	children := 0
	for i, f := range all { // the newest first
		if children += f.children; i >= historyForks || children > forkChildren || now.Sub(f.created) > keptForks {
			old = append(old, f)
		}
	}
	return old
}

// cutOff are forks whose request was never answered.
type cutOff map[sandbox.Key]sandbox.Fork

// settleForks forgets such forks, and returns them.
func settleForks(tx *journal.Tx) (cutOff, error) {
	unfinished := cutOff{}
	err := forks.Each(tx, "", func(_ string, f sandbox.Fork) error {
		if f.Phase == sandbox.PhasePending {
			unfinished[f.Key] = f
		}
		return nil
	})
	for _, f := range unfinished {
		err = errors.Join(err, forks.Delete(tx, f.String()))
	}
	return unfinished, err
}

// end ends a child of such a fork: a repeated request for the fork gets all of its children,
// under the same names. A child that was hibernated in the meantime stays, because a user
// knows it.
func (c cutOff) end(s *sandbox.Sandbox, now time.Time) {
	f, ok := c[sandbox.Key{Namespace: s.Namespace, Name: s.Fork}]
	if !ok || s.Parent != f.SourceID || s.Created.Before(f.Created) {
		return
	}
	switch s.State {
	case sandbox.Running, sandbox.Paused, sandbox.Hibernating:
		s.End(sandbox.ReasonLost, "the daemon was ended before its fork was complete", now)
	}
}
