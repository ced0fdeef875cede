package access

import (
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/journal"
)

// TestKeysAreMadeAlone: while one goroutine makes or revokes a key and waits for the disk,
// requests with other keys are let in.
func TestKeysAreMadeAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		defer n.Close()
		_, k := n.create(inA)
		other, _ := n.create(inA)
		for what, change := range map[string]func() error{
			"made":    func() error { _, _, err := n.Create(inA); return err },
			"revoked": func() error { return n.Revoke(k.ID) },
		} {
			gate, changed := make(chan struct{}), make(chan error, 2)
			go func() { changed <- n.db.Update(func(*journal.Tx) error { <-gate; return nil }) }()
			synctest.Wait()
			go func() { changed <- change() }()
			synctest.Wait()
			if !n.mu.TryLock() {
				close(gate)
				t.Fatalf("a key that is %s keeps everybody out", what)
			}
			n.mu.Unlock()
			if _, err := n.Find(other); err != nil {
				t.Error(err)
			}
			close(gate)
			for range 2 {
				if err := <-changed; err != nil {
					t.Error(err)
				}
			}
		}
	})
}
