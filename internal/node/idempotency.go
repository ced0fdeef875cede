package node

import (
	"context"
	"errors"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// outcome is what came of a request that worked. It is written in the same
// transaction as what the request made: either both are there, or neither.
type outcome struct {
	Body    string           `json:"body"`
	Time    time.Time        `json:"time"`
	Sandbox *sandbox.Sandbox `json:"sandbox,omitempty"`
	Fork    *sandbox.Fork    `json:"fork,omitempty"`

	Checkpoint *sandbox.CheckpointSize `json:"checkpoint,omitempty"`
}

var outcomes = journal.Collection[outcome]("outcomes")

// keepOutcomes is for how long a request is remembered; every forgetOutcomes
// those are looked for that can be forgotten.
const (
	keepOutcomes   = 24 * time.Hour
	forgetOutcomes = time.Hour
)

// request is one that is being served.
type request struct {
	body string
	done chan struct{}
}

// record writes what else belongs into the transaction that makes an object.
type record[T any] func(*journal.Tx, T) error

func (r record[T]) write(tx *journal.Tx, object T) error {
	if r == nil {
		return nil
	}
	return r(tx, object)
}

// ClaimOnce is Claim for a request that may come again. If it was done already,
// replayed is set and the sandbox is as it was then.
func (m *Manager) ClaimOnce(ctx context.Context, once sandbox.Once, k sandbox.Key, spec sandbox.ClaimSpec) (s sandbox.Sandbox, replayed bool, err error) {
	before, err := m.doOnce(ctx, once, func() error {
		s, err = m.claim(ctx, k, spec, func(tx *journal.Tx, s sandbox.Sandbox) error {
			return m.putOutcome(tx, once, outcome{Sandbox: &s})
		})
		return err
	})
	if before != nil && before.Sandbox != nil {
		return *before.Sandbox, true, nil
	}
	return s, false, err
}

// ForkOnce is Fork for a request that may come again, as ClaimOnce is Claim.
func (m *Manager) ForkOnce(ctx context.Context, once sandbox.Once, k sandbox.Key, source sandbox.Name, n int) (f sandbox.Fork, replayed bool, err error) {
	before, err := m.doOnce(ctx, once, func() error {
		f, err = m.fork(ctx, k, source, n, func(tx *journal.Tx, f sandbox.Fork) error {
			return m.putOutcome(tx, once, outcome{Fork: &f})
		})
		return err
	})
	if before != nil && before.Fork != nil {
		return *before.Fork, true, nil
	}
	return f, false, err
}

// CheckpointOnce is Checkpoint for a request that may come again, as ClaimOnce is
// Claim.
func (m *Manager) CheckpointOnce(ctx context.Context, once sandbox.Once, k sandbox.Key, source sandbox.Name) (c sandbox.CheckpointSize, replayed bool, err error) {
	before, err := m.doOnce(ctx, once, func() error {
		c, err = m.checkpoint(ctx, k, source, func(tx *journal.Tx, c sandbox.CheckpointSize) error {
			return m.putOutcome(tx, once, outcome{Checkpoint: &c})
		})
		return err
	})
	if before != nil && before.Checkpoint != nil {
		return *before.Checkpoint, true, nil
	}
	return c, false, err
}

// RestoreOnce is Restore for a request that may come again, as ClaimOnce is
// Claim.
func (m *Manager) RestoreOnce(ctx context.Context, once sandbox.Once, k sandbox.Key, checkpoint sandbox.Name, spec sandbox.RestoreSpec) (s sandbox.Sandbox, replayed bool, err error) {
	before, err := m.doOnce(ctx, once, func() error {
		s, err = m.restore(ctx, k, checkpoint, spec, func(tx *journal.Tx, s sandbox.Sandbox) error {
			return m.putOutcome(tx, once, outcome{Sandbox: &s})
		})
		return err
	})
	if before != nil && before.Sandbox != nil {
		return *before.Sandbox, true, nil
	}
	return s, false, err
}

// doOnce does a request, or returns what came of it before. While the same one
// is being served it waits: if that fails, this one is tried.
func (m *Manager) doOnce(ctx context.Context, once sandbox.Once, do func() error) (*outcome, error) {
	for {
		before, other, err := m.beginRequest(once)
		if err != nil {
			return nil, err
		}
		if before != nil {
			return before, nil
		}
		if other == nil {
			break
		}
		select {
		case <-other.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	defer m.endRequest(once)
	return nil, do()
}

// beginRequest makes the request the caller's, unless it was done before or
// another caller does it.
func (m *Manager) beginRequest(once sandbox.Once) (*outcome, *request, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if other := m.requests[once.Key]; other != nil {
		return nil, other, once.Check(other.body)
	}
	var before outcome
	var found bool
	err := m.db.View(func(tx *journal.Tx) (err error) {
		before, found, err = outcomes.Get(tx, once.Key)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	if found && time.Since(before.Time) < keepOutcomes {
		return &before, nil, once.Check(before.Body)
	}
	m.requests[once.Key] = &request{body: once.Body, done: make(chan struct{})}
	return nil, nil, nil
}

func (m *Manager) endRequest(once sandbox.Once) {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.requests[once.Key].done)
	delete(m.requests, once.Key)
}

// putOutcome remembers a request, and forgets those that are old.
func (m *Manager) putOutcome(tx *journal.Tx, once sandbox.Once, o outcome) error {
	o.Body, o.Time = once.Body, time.Now().UTC()
	var old []string
	var err error
	last := m.forgotten.Load()
	if o.Time.Sub(time.Unix(last, 0)) > forgetOutcomes && m.forgotten.CompareAndSwap(last, o.Time.Unix()) {
		err = outcomes.Each(tx, "", func(key string, before outcome) error {
			if o.Time.Sub(before.Time) >= keepOutcomes {
				old = append(old, key)
			}
			return nil
		})
	}
	for _, key := range old {
		err = errors.Join(err, outcomes.Delete(tx, key))
	}
	return errors.Join(err, outcomes.Put(tx, once.Key, o))
}
