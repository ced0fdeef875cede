package node

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// slowRegistry is a builder whose registry answers when it is told to.
type slowRegistry struct {
	builder
	answers chan struct{}
	mu      sync.Mutex // protects asked
	asked   map[sandbox.Namespace]int
}

func (b *slowRegistry) ResolveImage(ctx context.Context, q ImageQuestion) string {
	done, err := q.Turn(ctx)
	if err != nil {
		return ""
	}
	defer done()
	b.mu.Lock()
	b.asked[q.Namespace]++
	b.mu.Unlock()
	<-b.answers
	return "sha256:digest"
}

func (b *slowRegistry) asks(n sandbox.Namespace) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.asked[n]
}

// TestLookupTurns: templates that are applied ask so many registries at once, and those of one
// namespace half of them: however slow these are, another namespace's is asked.
func TestLookupTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &slowRegistry{answers: make(chan struct{}), asked: map[sandbox.Namespace]int{}}
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Builder = b })
		defer func() { _ = m.Close() }()
		var all sync.WaitGroup
		apply := func(n sandbox.Namespace, name string) {
			all.Go(func() {
				k := sandbox.Key{Namespace: n, Name: sandbox.Name(name)}
				if _, err := m.ApplyTemplate(t.Context(), k, sandbox.TemplateSpec{Image: "slow", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
					t.Error(err)
				}
			})
		}
		for i := range 2 * lookups {
			apply("greedy", fmt.Sprint("t-", i))
		}
		synctest.Wait()
		if n := b.asks("greedy"); n != lookups/2 {
			t.Errorf("one namespace asks %d registries at once, of %d for all", n, lookups)
		}
		apply("other", "t")
		synctest.Wait()
		if n := b.asks("other"); n != 1 {
			t.Error("another namespace waits for it")
		}
		close(b.answers)
		all.Wait()
	})
}
