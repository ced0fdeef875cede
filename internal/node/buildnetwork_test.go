package node

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// lone is the machine of a played build.
type lone struct{ engine.Sandbox }

func (lone) Close() error { return nil }

// connecting is a builder whose builds are connected.
type connecting struct{ builder }

func (b *connecting) Build(ctx context.Context, req BuildRequest) (sandbox.Built, error) {
	sb, err := req.Join(ctx, lone{})
	if err != nil {
		return sandbox.Built{}, err
	}
	built, err := b.builder.Build(ctx, req)
	return built, errors.Join(err, sb.Close())
}

// TestBuildNetwork: a build, and the steps that make its forks ready, may connect as the
// template's buildNetwork says, or as the node's default says at that time. The policy of the
// template's sandboxes makes no difference, and no connection is left.
func TestBuildNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, h := newNetwork(), nodetest.NewHost(t)
		n.builds = *rules(t, "deny", "index.example.org:443")
		m := daemon(t, t.TempDir(), h, func(c *Config) { c.Network, c.Builder = n, &connecting{} })
		defer func() { _ = m.Close() }()
		build := func(name sandbox.Name, spec sandbox.TemplateSpec, want policy.Policy) {
			t.Helper()
			n.mu.Lock()
			n.joins = nil
			n.mu.Unlock()
			spec.MilliCPUs, spec.Memory = 1000, 64*mib
			if spec.Network != sandbox.NetworkNone {
				spec.NetworkPolicy = rules(t, "allow", "sandbox.example:443")
			}
			if _, err := m.ApplyTemplate(t.Context(), key(string(name)), spec); err != nil {
				t.Fatal(err)
			}
			if _, err := m.ApplyPool(t.Context(), key(string(name)), sandbox.PoolSpec{Template: name, Replicas: 1, Stage: sandbox.AfterInit}); err != nil {
				t.Fatal(err)
			}
			if err := m.WaitPool(t.Context(), key(string(name))); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			n.mu.Lock()
			defer n.mu.Unlock()
			text, err := json.Marshal(policy.Set{want})
			if err != nil {
				t.Fatal(err)
			}
			if len(n.joins) < 2 { // the build's machine, and its first fork
				t.Errorf("%s: %d machines were connected", name, len(n.joins))
			}
			for _, j := range n.joins {
				if got, err := json.Marshal(j.Policies); err != nil || string(got) != string(text) {
					t.Errorf("%s: a build may connect to %s, %v; want %s", name, got, err, text)
				}
			}
			if len(n.joined) > 0 {
				t.Errorf("%s: %d machines stay connected", name, len(n.joined))
			}
		}
		build("default", sandbox.TemplateSpec{Image: "one"}, n.builds)
		own := rules(t, "deny", "own.example.org:443")
		build("own", sandbox.TemplateSpec{Image: "one", BuildNetwork: own}, *own)
		build("closed", sandbox.TemplateSpec{Image: "one", BuildNetwork: rules(t, "deny")}, *rules(t, "deny"))
		build("none", sandbox.TemplateSpec{Image: "one", Network: sandbox.NetworkNone}, policy.Policy{})
		n.mu.Lock()
		n.builds = *rules(t, "deny", "mirror.example.org:443")
		n.mu.Unlock()
		build("default", sandbox.TemplateSpec{Image: "two"}, *rules(t, "deny", "mirror.example.org:443"))
	})
}
