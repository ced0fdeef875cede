package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// watcher writes down what it is told.
type watcher struct {
	mu   sync.Mutex // protects said
	said []string
	gate chan struct{} // each waits for it, if there is one
}

func (w *watcher) each(s sandbox.Sandbox) error {
	if w.gate != nil {
		<-w.gate
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said = append(w.said, fmt.Sprintf("%s/%s %s", s.Namespace, s.Name, s.State))
	return nil
}

func (w *watcher) synced() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said = append(w.said, "synced")
	return nil
}

// wants takes what was told since the last time.
func (w *watcher) wants(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Equal(w.said, want) {
		t.Errorf("told %q, not %q", w.said, want)
	}
	w.said = nil
}

// TestWatch: whoever watches is told what is there and what changes, in his
// namespace or in all; who is slow is told the last, and holds nobody up.
func TestWatch(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		claim(t, m, "gone", sandbox.Lifetime{})
		do := func(_ sandbox.Sandbox, err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		do(m.Kill(t.Context(), key("gone")))
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		start := func(w *watcher, n sandbox.Namespace) {
			all.Go(func() {
				if err := m.Watch(ctx, n, w.each, w.synced); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
		}
		own, every, other, slow := &watcher{}, &watcher{}, &watcher{}, &watcher{gate: make(chan struct{})}
		start(own, sandbox.DefaultNamespace)
		start(every, "")
		start(other, "other")
		start(slow, "")
		own.wants(t, "default/a Running", "synced")
		every.wants(t, "default/a Running", "synced")
		other.wants(t, "synced")
		time.Sleep(time.Second) // who is older is told of first
		claim(t, m, "b", sandbox.Lifetime{})
		own.wants(t, "default/b Running")
		do(m.Pause(t.Context(), key("a")))
		own.wants(t, "default/a Paused")
		do(m.Kill(t.Context(), key("b")))
		own.wants(t, "default/b Ended")
		every.wants(t, "default/b Running", "default/a Paused", "default/b Ended")
		other.wants(t)
		close(slow.gate)
		slow.wants(t, "default/a Running", "synced", "default/a Paused", "default/b Ended")
		cancel()
		all.Wait()
		if len(m.watches.all) != 0 {
			t.Errorf("%d watches are left", len(m.watches.all))
		}
		failed := errors.New("gone")
		if err := m.Watch(t.Context(), "", func(sandbox.Sandbox) error { return failed }, own.synced); !errors.Is(err, failed) {
			t.Error(err)
		}
		closing := make(chan error, 1)
		go func() { closing <- m.Watch(context.Background(), "", every.each, every.synced) }()
		synctest.Wait()
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-closing; !sandbox.HasCode(err, sandbox.CodeClosing) {
			t.Errorf("when the daemon goes: %v", err)
		}
	})
}
