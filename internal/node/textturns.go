package node

import (
	"context"
	"sync"
)

// textTurns serializes the operations on a text. The wait for a turn can be ended by a
// context.
type textTurns struct {
	mu    sync.Mutex // protects taken
	taken map[string]chan struct{}
}

// take waits for the turn of a text, and returns the function that ends it.
func (t *textTurns) take(ctx context.Context, text string) (done func(), err error) {
	for {
		t.mu.Lock()
		other := t.taken[text]
		if other == nil {
			mine := make(chan struct{})
			if t.taken == nil {
				t.taken = map[string]chan struct{}{}
			}
			t.taken[text] = mine
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				defer t.mu.Unlock()
				delete(t.taken, text)
				close(mine)
			}, nil
		}
		t.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
