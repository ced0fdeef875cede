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

// What came of each kind of request.
func sandboxIn(o *outcome) **sandbox.Sandbox           { return &o.Sandbox }
func forkIn(o *outcome) **sandbox.Fork                 { return &o.Fork }
func checkpointIn(o *outcome) **sandbox.CheckpointSize { return &o.Checkpoint }

// doOnce makes an object as a request asks. If the request came before and was done,
// replayed is set and the object is as it was then.
func doOnce[T any](ctx context.Context, m *Manager, once *sandbox.Once, in func(*outcome) **T, do func(record[T]) (T, error)) (made T, replayed bool, err error) {
	if once == nil {
		made, err = do(nil)
		return made, false, err
	}
	before, err := m.serveOnce(ctx, *once, func() error {
		made, err = do(func(tx *journal.Tx, object T) error {
			var o outcome
			*in(&o) = &object
			return m.putOutcome(tx, *once, o)
		})
		return err
	})
	if before != nil && *in(before) != nil {
		return **in(before), true, nil
	}
	return made, false, err
}

// serveOnce does a request, or returns what came of it before. While the same one
// is being served it waits: if that fails, this one is tried.
func (m *Manager) serveOnce(ctx context.Context, once sandbox.Once, do func() error) (*outcome, error) {
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
