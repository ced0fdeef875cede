package node

import (
	"context"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// request is a request that is being served.
type request struct {
	body string
	done chan struct{}
	// serving is set once it is known that the request was not done before. The
	// manager's mutex protects it.
	serving bool
}

// record adds further writes to the transaction that makes an object.
type record[T any] func(*journal.Tx, T) error

func (r record[T]) write(tx *journal.Tx, object T) error {
	if r == nil {
		return nil
	}
	return r(tx, object)
}

// doOnce makes an object for a request. If the same request has succeeded before, it
// returns the object of that time, and sets replayed.
func doOnce[T any](ctx context.Context, m *Manager, once *sandbox.Once, in func(*keptAnswer) **T, do func(record[T]) (T, error)) (made T, replayed bool, err error) {
	if once == nil {
		made, err = do(nil)
		return made, false, err
	}
	before, err := m.serveOnce(ctx, *once, func() error {
		made, err = do(func(tx *journal.Tx, object T) error {
			var a keptAnswer
			*in(&a) = &object
			return keepAnswer(tx, *once, a)
		})
		return err
	})
	if before != nil && *in(before) != nil {
		return **in(before), true, nil
	}
	return made, false, err
}

// serveOnce runs a request, or returns its earlier answer. While the same request
// is being served, it waits; if that one fails, it runs this one.
func (m *Manager) serveOnce(ctx context.Context, once sandbox.Once, do func() error) (*keptAnswer, error) {
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
// another caller runs it. Calls that come while the journal is read wait for
// that.
func (m *Manager) beginRequest(once sandbox.Once) (*keptAnswer, *request, error) {
	m.mu.Lock()
	if other := m.requests[once.Key]; other != nil {
		defer m.mu.Unlock()
		if !other.serving {
			return nil, other, nil // unlike this one, the other may differ from the request that was done before
		}
		return nil, other, once.Check(other.body)
	}
	mine := &request{body: once.Body, done: make(chan struct{})}
	m.requests[once.Key] = mine
	m.mu.Unlock()
	var before keptAnswer
	var found bool
	err := m.db.View(func(tx *journal.Tx) (err error) {
		before, found, err = answers.Get(tx, once.Key)
		return err
	})
	if err != nil {
		m.endRequest(once)
		return nil, nil, err
	}
	if found && time.Since(before.Time) < keepAnswers {
		m.endRequest(once)
		return &before, nil, once.Check(before.Body)
	}
	m.mu.Lock()
	mine.serving = true
	m.mu.Unlock()
	return nil, nil, nil
}

func (m *Manager) endRequest(once sandbox.Once) {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.requests[once.Key].done)
	delete(m.requests, once.Key)
}
