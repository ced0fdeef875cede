package node

import (
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestCodes: ids of sandboxes contain the codes of the node that has made them, even if its
// configuration changes later. Ids of machines and snapshots have no codes.
func TestCodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		codes := sandbox.Codes{Cluster: "c1", Node: "n1"}
		m := daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		old := claim(t, m, "old", sandbox.Lifetime{})
		must(t, m.Close())
		m = daemon(t, dir, h, func(c *Config) { c.Codes = codes })
		synctest.Wait()
		coded := claim(t, m, "coded", sandbox.Lifetime{})
		if _, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "old", Replicas: 1}}); err != nil {
			t.Fatal(err)
		}
		child := wantState(t, m, "f-1", sandbox.Running)
		must(t, m.Close())
		m = daemon(t, dir, h)
		synctest.Wait()
		for _, want := range []struct {
			sandbox.Sandbox
			sandbox.Codes
		}{{old, sandbox.Codes{}}, {coded, codes}, {child, codes}} {
			s, err := m.SandboxByID(t.Context(), want.ID)
			if got, _ := want.ID.Codes(); err != nil || s.Name != want.Name || got != want.Codes || len(s.Machine) != len(old.ID) {
				t.Errorf("%+v has %+v: %v", s, got, err)
			}
			if _, err := m.Hibernate(t.Context(), s.Key, sandbox.Precondition{ID: want.ID}); err != nil {
				t.Error(err)
			}
		}
	})
}
