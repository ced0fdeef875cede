package node

import (
	"context"
	"errors"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// keptAnswer is what a request that worked was answered with. It is written in the same
// transaction as what the request made: either both are there, or neither.
type keptAnswer struct {
	Body    string           `json:"body"`
	Time    time.Time        `json:"time"`
	Sandbox *sandbox.Sandbox `json:"sandbox,omitempty"`
	Fork    *sandbox.Fork    `json:"fork,omitempty"`

	Checkpoint *sandbox.CheckpointSize `json:"checkpoint,omitempty"`
}

// The collection has the name under which journals already have it.
var answers = journal.Collection[keptAnswer]("outcomes")

// answersByTime has the keys of answers, the oldest first.
var answersByTime = journal.Collection[string]("outcomes-by-time")

// keepAnswers is for how long an answer is kept. Each new one forgets at most forgetStep
// of those that are older.
const keepAnswers = 24 * time.Hour

// request is one that is being served.
type request struct {
	body string
	done chan struct{}
	// serving is set once it is known that it was not done before. The manager's mutex
	// protects it.
	serving bool
}

// record writes what else belongs into the transaction that makes an object.
type record[T any] func(*journal.Tx, T) error

func (r record[T]) write(tx *journal.Tx, object T) error {
	if r == nil {
		return nil
	}
	return r(tx, object)
}

// The object in the answer to each kind of request.
func sandboxIn(a *keptAnswer) **sandbox.Sandbox           { return &a.Sandbox }
func forkIn(a *keptAnswer) **sandbox.Fork                 { return &a.Fork }
func checkpointIn(a *keptAnswer) **sandbox.CheckpointSize { return &a.Checkpoint }

// doOnce makes an object as a request asks. If the request came before and was done,
// replayed is set and the object is as it was then.
func doOnce[T any](ctx context.Context, m *Manager, once *sandbox.Once, in func(*keptAnswer) **T, do func(record[T]) (T, error)) (made T, replayed bool, err error) {
	if once == nil {
		made, err = do(nil)
		return made, false, err
	}
	before, err := m.serveOnce(ctx, *once, func() error {
		made, err = do(func(tx *journal.Tx, object T) error {
			var a keptAnswer
			*in(&a) = &object
			return m.keepAnswer(tx, *once, a)
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
// another caller does it. Whoever comes while the journal is read waits for that.
func (m *Manager) beginRequest(once sandbox.Once) (*keptAnswer, *request, error) {
	m.mu.Lock()
	if other := m.requests[once.Key]; other != nil {
		defer m.mu.Unlock()
		if !other.serving {
			return nil, other, nil // it may differ from the one that was done before, and this one not
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

// keepAnswer keeps the answer to a request, and forgets some of those that are old.
func (m *Manager) keepAnswer(tx *journal.Tx, once sandbox.Once, a keptAnswer) error {
	a.Body, a.Time = once.Body, time.Now().UTC()
	old := map[string]string{}
	err := answersByTime.Each(tx, "", func(at, key string) error {
		if len(old) == forgetStep || at >= journal.TimeKey(a.Time.Add(1-keepAnswers), "") {
			return errEnough
		}
		old[at] = key
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	for at, key := range old {
		err = errors.Join(err, answersByTime.Delete(tx, at))
		// A later answer may have taken its place.
		before, found, getErr := answers.Get(tx, key)
		if err = errors.Join(err, getErr); found && journal.TimeKey(before.Time, key) == at {
			err = errors.Join(err, answers.Delete(tx, key))
		}
	}
	return errors.Join(err, answers.Put(tx, once.Key, a), answersByTime.Put(tx, journal.TimeKey(a.Time, once.Key), once.Key))
}
