package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestAnswersAreBounded: of a namespace that makes many requests, or large ones, the last
// answers are kept and no more; those of another stay.
func TestAnswersAreBounded(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		answer := func(n sandbox.Namespace, from, count int, detail string) {
			t.Helper()
			for ; count > 0; count -= 100 {
				must(t, m.db.Update(func(tx *journal.Tx) error {
					for i := range min(100, count) {
						s := sandbox.Sandbox{Key: sandbox.Key{Namespace: n, Name: "a"}, Detail: detail}
						once := sandbox.Once{Key: fmt.Sprintf("%s-%06d", n, from+i)}
						if err := keepAnswer(tx, once, keptAnswer{Sandbox: &s}); err != nil {
							return err
						}
					}
					return nil
				}))
				from += 100
			}
		}
		want := func(n sandbox.Namespace, first, count int) {
			t.Helper()
			must(t, m.db.View(func(tx *journal.Tx) error {
				found, key := 0, ""
				err := answers.Each(tx, string(n)+"-", func(k string, _ keptAnswer) error {
					if found++; key == "" {
						key = k
					}
					return nil
				})
				if want := fmt.Sprintf("%s-%06d", n, first); found != count || key != want {
					t.Errorf("%d answers from %s on are kept, not %d from %s", found, key, count, want)
				}
				return err
			}))
		}
		answer("quiet", 0, 5, "")
		answer("busy", 0, keptPerSpace+1000, "")
		want("busy", 1000, keptPerSpace)
		large := strings.Repeat("x", keptSpaceBytes/100)
		answer("large", 0, 300, large)
		want("large", 201, 99)
		// Large ones among many small ones forget those step by step.
		answer("busy", keptPerSpace+1000, 160, large)
		want("quiet", 0, 5)
		must(t, m.db.View(func(tx *journal.Tx) error {
			kept, times, places, bytes := 0, 0, 0, 0
			err := errors.Join(
				answers.Each(tx, "", func(string, keptAnswer) error { kept++; return nil }),
				answersByTime.Each(tx, "", func(string, string) error { times++; return nil }),
				answersBySpace.Each(tx, "", func(string, answerPlace) error { places++; return nil }),
				answersBySpace.Each(tx, "busy/", func(_ string, p answerPlace) error { bytes += p.Bytes; return nil }))
			if kept != times || kept != places || bytes > keptSpaceBytes || bytes < keptSpaceBytes*9/10 {
				t.Errorf("%d answers, of which %d are listed by time and %d by namespace; the busy one has %d bytes", kept, times, places, bytes)
			}
			return err
		}))
	})
}
