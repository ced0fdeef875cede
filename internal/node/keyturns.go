package node

import (
	"sync"

	"agentrun.dev/internal/sandbox"
)

// keyTurns serializes changes of an object that are made first in the journal and then in
// memory. So memory ends up with the last state of the journal. Changes of other objects
// need not wait.
type keyTurns struct {
	mu    sync.Mutex // protects all following fields
	turns map[sandbox.Key]*keyTurn
}

type keyTurn struct {
	mu    sync.Mutex // held by the owner of the turn
	users int        // those that have it or wait for it; protected by keyTurns.mu
}

// lock waits for the turn of an object, and returns the function that ends it.
func (t *keyTurns) lock(k sandbox.Key) (unlock func()) {
	t.mu.Lock()
	if t.turns == nil {
		t.turns = map[sandbox.Key]*keyTurn{}
	}
	turn := t.turns[k]
	if turn == nil {
		turn = &keyTurn{}
		t.turns[k] = turn
	}
	turn.users++
	t.mu.Unlock()
	turn.mu.Lock()
	return func() {
		turn.mu.Unlock()
		t.mu.Lock()
		defer t.mu.Unlock()
		if turn.users--; turn.users == 0 {
			delete(t.turns, k)
		}
	}
}
