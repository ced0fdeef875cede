package node

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestListsByBytes: a page of each kind that is read from the journal ends where its records
// have so many bytes, has one object at least, and all pages together have all.
func TestListsByBytes(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		for i := range 5 {
			name := fmt.Sprint("n", i)
			must(t, second(m.ApplyTemplate(t.Context(), key(name), sandbox.TemplateSpec{Image: "python", MilliCPUs: 1000, Memory: 64 * mib})))
			must(t, second(m.ApplyPool(t.Context(), key(name), sandbox.PoolSpec{Template: sandbox.Name(name), Stage: sandbox.AfterReady})))
			checkpoint(t, m, name, "a")
			must(t, third(m.Fork(t.Context(), sandbox.ForkRequest{Key: key(name), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})))
			synctest.Wait()
		}
		for kind, list := range map[string]func(sandbox.Page) ([]sandbox.Name, error){
			"templates": func(p sandbox.Page) ([]sandbox.Name, error) {
				l, err := m.Templates(t.Context(), sandbox.DefaultNamespace, p)
				return namesOf(l, func(o sandbox.Template) sandbox.Name { return o.Name }), err
			},
			"pools": func(p sandbox.Page) ([]sandbox.Name, error) {
				l, err := m.Pools(t.Context(), sandbox.DefaultNamespace, p)
				return namesOf(l, func(o sandbox.Pool) sandbox.Name { return o.Name }), err
			},
			"checkpoints": func(p sandbox.Page) ([]sandbox.Name, error) {
				l, err := m.Checkpoints(t.Context(), sandbox.DefaultNamespace, p)
				return namesOf(l, func(o sandbox.CheckpointSize) sandbox.Name { return o.Name }), err
			},
			"forks": func(p sandbox.Page) ([]sandbox.Name, error) {
				l, err := m.Forks(t.Context(), sandbox.DefaultNamespace, p)
				return namesOf(l, func(o sandbox.Fork) sandbox.Name { return o.Name }), err
			},
		} {
			all, err := list(sandbox.Page{})
			if err != nil || len(all) < 5 {
				t.Fatalf("%s: %q, %v", kind, all, err)
			}
			var got []sandbox.Name
			for after := sandbox.Name(""); ; {
				page, err := list(sandbox.Page{After: string(after), Bytes: 1})
				must(t, err)
				if len(page) == 0 {
					break
				}
				if len(page) != 1 {
					t.Errorf("%s: a page of one byte has %q", kind, page)
				}
				got, after = append(got, page...), page[len(page)-1]
			}
			if !slices.Equal(got, all) {
				t.Errorf("%s: %q in pages, %q at once", kind, got, all)
			}
		}
	})
}

func namesOf[T any](list []T, name func(T) sandbox.Name) (out []sandbox.Name) {
	for _, o := range list {
		out = append(out, name(o))
	}
	return out
}
