package node

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/network/inject"
	"agentrun.dev/internal/node/authority"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal/sealtest"
)

// injectRef is a secret for requests to api.example.org.
func injectRef() sandbox.SecretRef {
	return sandbox.SecretRef{Secret: "llm", Key: "API_KEY", Inject: &sandbox.Inject{Host: "api.example.org", Header: "Authorization", Format: "Bearer {}"}}
}

// trusting opens a daemon with a network and a pool whose template trusts the namespace's CA.
func trusting(t *testing.T, dir string, h *nodetest.Host, n *network, change ...func(*sandbox.TemplateSpec)) *Manager {
	t.Helper()
	m := daemon(t, dir, h, func(c *Config) { c.Network = n })
	applyTrusting(t, m, change...)
	if _, err := m.ApplySecret(t.Context(), key("llm"), sandbox.SecretData{"API_KEY": []byte(canary), "lines": []byte("a\nb")}); err != nil {
		t.Fatal(err)
	}
	return m
}

func applyTrusting(t *testing.T, m *Manager, change ...func(*sandbox.TemplateSpec)) {
	t.Helper()
	spec := sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib, NetworkPolicy: rules(t, "deny", "api.example.org:443"), TrustNamespaceCA: true}
	for _, c := range change {
		c(&spec)
	}
	if _, err := m.ApplyTemplate(t.Context(), key("python"), spec); err != nil {
		t.Fatal(err)
	}
	if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.WaitPool(t.Context(), key("pool")); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

func claimInject(ctx context.Context, m *Manager, name string, refs ...sandbox.SecretRef) (sandbox.Sandbox, error) {
	s, _, err := m.Claim(ctx, sandbox.ClaimRequest{Key: key(name), Spec: sandbox.ClaimSpec{Pool: "pool", Secrets: refs}})
	return s, err
}

// hosts are the hosts whose requests get values, of a sandbox.
func (n *network) hosts(t *testing.T, m *Manager, name string) []inject.Host {
	t.Helper()
	j, ok := n.of(t, m, name)
	if !ok {
		t.Fatalf("%s is not joined", name)
	}
	return j.Injections
}

// wantValue checks what requests of a sandbox get.
func (n *network) wantValue(t *testing.T, m *Manager, name, value, problem string) {
	t.Helper()
	hosts := n.hosts(t, m, name)
	if len(hosts) != 1 || len(hosts[0].Credentials) != 1 {
		t.Fatalf("%s: %d hosts", name, len(hosts))
	}
	h, c := hosts[0], hosts[0].Credentials[0]
	if h.Name != "api.example.org" || c.Header != "Authorization" || c.Format != "Bearer {}" || c.Placeholder != "agentrun-injected.llm.API_KEY" || c.Secret != "llm/API_KEY" {
		t.Errorf("%s: %+v", name, h)
	}
	if string(c.Value) != value || !strings.Contains(h.Problem+c.Problem, problem) || (problem == "") != (h.Problem+c.Problem == "") {
		t.Errorf("%s: the value is wrong (%t), the problems are %q and %q, want %q", name, string(c.Value) != value, h.Problem, c.Problem, problem)
	}
}

// TestInject: a claim's value goes to the network, and not into the sandbox; it follows its
// secret, and goes along with forks, sleep, checkpoints and restarts of the daemon.
func TestInject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h, n := t.TempDir(), nodetest.NewHost(t), newNetwork()
		m := trusting(t, dir, h, n)
		defer func() { _ = m.Close() }()
		s, err := claimInject(as(t, "alice"), m, "a", injectRef())
		if err != nil {
			t.Fatal(err)
		}
		if !s.HoldsSecrets() || s.SecretsBy != "alice" || s.TrustedCA == "" {
			t.Errorf("%+v", s)
		}
		n.wantValue(t, m, "a", canary, "")
		host := n.hosts(t, m, "a")[0]
		if _, err := inject.Prepare([]inject.Host{host}); err != nil {
			t.Errorf("a netd would not take it: %v", err)
		}
		env, err := m.secretEnv(sandbox.DefaultNamespace, s.Secrets)
		if err != nil || len(env) != 1 || env["API_KEY"] != "agentrun-injected.llm.API_KEY" {
			t.Errorf("the environment has %d variables, and the placeholder: %t", len(env), env["API_KEY"] == "agentrun-injected.llm.API_KEY")
		}

		fork := sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}}
		if _, _, err := m.Fork(as(t, "bob"), fork); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("a fork by somebody else: %v", err)
		}
		if _, _, err := m.Fork(as(t, "alice"), fork); err != nil {
			t.Fatal(err)
		}
		n.wantValue(t, m, "f-1", canary, "")

		rotate := func(value string) {
			t.Helper()
			if _, err := m.SetSecret(t.Context(), key("llm"), sandbox.SecretData{"API_KEY": []byte(value)}); err != nil {
				t.Fatal(err)
			}
		}
		rotate("sk-2")
		n.wantValue(t, m, "a", "sk-2", "")
		n.wantValue(t, m, "f-1", "sk-2", "")

		if _, err := m.Hibernate(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		rotate("sk-3") // while it sleeps
		if _, err := m.Resume(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		n.wantValue(t, m, "a", "sk-3", "")
		// A change of the policy takes nothing away, and the other way round.
		if _, err := m.SetNetworkPolicy(t.Context(), key("a"), rules(t, "deny", "api.example.org")); err != nil {
			t.Fatal(err)
		}
		n.wantValue(t, m, "a", "sk-3", "")
		rotate("sk-4")
		n.wantPolicies(t, m, "a", `[{"egress":"deny","allow":["api.example.org:443"]},{"egress":"deny","allow":["api.example.org"]}]`)

		if _, _, err := m.Checkpoint(as(t, "alice"), sandbox.CheckpointRequest{Key: key("c"), Source: "a"}); err != nil {
			t.Fatal(err)
		}
		restore := sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c", Spec: sandbox.RestoreSpec{Env: sandbox.Env{"MORE": "1"}}}
		if _, _, err := m.Restore(as(t, "bob"), restore); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("a restore by somebody else: %v", err)
		}
		if _, _, err := m.Restore(as(t, "alice"), restore); err != nil {
			t.Fatal(err)
		}
		n.wantValue(t, m, "r", "sk-4", "")

		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		for _, value := range []string{canary, "sk-4"} {
			if found := sealtest.FilesWith(t, dir, value); found != nil {
				t.Errorf("in the clear in %v", found)
			}
		}
		if found := sealtest.FilesWith(t, dir, "PRIVATE KEY"); found != nil {
			t.Errorf("the CA's key is in the clear in %v", found)
		}
		n = newNetwork()
		m = daemon(t, dir, h, func(c *Config) { c.Network = n })
		<-m.adopted
		n.wantValue(t, m, "a", "sk-4", "")
		rotate("sk-5")
		n.wantValue(t, m, "f-1", "sk-5", "")
		rotate("two\nlines")
		n.wantValue(t, m, "a", "", "line break")
		if err := m.DeleteSecret(t.Context(), key("llm")); err != nil {
			t.Fatal(err)
		}
		n.wantValue(t, m, "a", "", "secret llm does not exist")
		if _, err := m.Kill(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if _, left := m.injections.all[nil]; left || len(m.injections.all) != 2 { // f-1 and r
			t.Errorf("%d machines get values", len(m.injections.all))
		}
	})
}

// TestInjectRefuses: claims whose values could never be put into requests are refused by name.
func TestInjectRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		m := trusting(t, t.TempDir(), nodetest.NewHost(t), n)
		defer func() { _ = m.Close() }()
		ref := func(change func(*sandbox.SecretRef)) sandbox.SecretRef {
			r := injectRef()
			change(&r)
			return r
		}
		for name, c := range map[string]struct {
			ref  sandbox.SecretRef
			code sandbox.Code
			says string
		}{
			"another host":      {ref(func(r *sandbox.SecretRef) { r.Inject.Host = "evil.example" }), sandbox.CodeConflict, "template python does not allow"},
			"a wildcard":        {ref(func(r *sandbox.SecretRef) { r.Inject.Host = "*.example.org" }), sandbox.CodeInvalid, "inject.host"},
			"an address":        {ref(func(r *sandbox.SecretRef) { r.Inject.Host = "10.0.0.1" }), sandbox.CodeInvalid, "inject.host"},
			"no header":         {ref(func(r *sandbox.SecretRef) { r.Inject.Header = "" }), sandbox.CodeInvalid, "inject.header"},
			"a broken header":   {ref(func(r *sandbox.SecretRef) { r.Inject.Header = "A: b\r\nC" }), sandbox.CodeInvalid, "inject.header"},
			"an underscore":     {ref(func(r *sandbox.SecretRef) { r.Inject.Header = "X_Key" }), sandbox.CodeInvalid, "inject.header"},
			"a header of HTTP":  {ref(func(r *sandbox.SecretRef) { r.Inject.Header = "host" }), sandbox.CodeInvalid, "belongs to HTTP itself"},
			"a hop's header":    {ref(func(r *sandbox.SecretRef) { r.Inject.Header = "proxy-authorization" }), sandbox.CodeInvalid, "belongs to HTTP itself"},
			"a format of none":  {ref(func(r *sandbox.SecretRef) { r.Inject.Format = "Bearer" }), sandbox.CodeInvalid, "inject.format"},
			"a format of two":   {ref(func(r *sandbox.SecretRef) { r.Inject.Format = "{} {}" }), sandbox.CodeInvalid, "inject.format"},
			"lines in a format": {ref(func(r *sandbox.SecretRef) { r.Inject.Format = "{}\r\nX: y" }), sandbox.CodeInvalid, "inject.format"},
			"lines in a value":  {ref(func(r *sandbox.SecretRef) { r.Key, r.Env = "lines", "LINES" }), sandbox.CodeInvalid, "llm/lines cannot be put into the header"},
			"no such secret":    {ref(func(r *sandbox.SecretRef) { r.Secret = "none" }), sandbox.CodeNotFound, "secret none"},
		} {
			_, err := claimInject(t.Context(), m, "refused", c.ref)
			if !sandbox.HasCode(err, c.code) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), canary) {
				t.Errorf("%s: %v", name, err)
			}
		}
		// A CA that is limited to other names.
		if _, err := m.SetNamespaceCA(t.Context(), sandbox.DefaultNamespace, sandbox.CASpec{Names: []string{"openai.com"}}); err != nil {
			t.Fatal(err)
		}
		applyTrusting(t, m)
		if _, err := claimInject(t.Context(), m, "refused", injectRef()); !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "does not stand for api.example.org") {
			t.Errorf("with a CA of other names: %v", err)
		}
		// A template that trusts none.
		applyTrusting(t, m, func(s *sandbox.TemplateSpec) { s.TrustNamespaceCA = false })
		if _, err := claimInject(t.Context(), m, "refused", injectRef()); !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "template python trusts no CA") {
			t.Errorf("of a template without a CA: %v", err)
		}
		synctest.Wait()
		if len(n.joined) != 0 || len(m.injections.all) != 0 {
			t.Errorf("what was refused has left %d machines", len(n.joined))
		}
		if _, st, err := m.Pool(t.Context(), key("pool")); err != nil || st.Ready != 1 {
			t.Errorf("the pool after the refusals: %+v, %v", st, err)
		}
	})
}

// TestOtherCA: a template that was built with another CA is refused by name until it is built
// again, and sandboxes that trust it are told why their requests are refused.
func TestOtherCA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h, n := t.TempDir(), nodetest.NewHost(t), newNetwork()
		m := trusting(t, dir, h, n)
		defer func() { _ = m.Close() }()
		if _, err := claimInject(t.Context(), m, "a", injectRef()); err != nil {
			t.Fatal(err)
		}
		first, err := m.NamespaceCA(t.Context(), sandbox.DefaultNamespace)
		if err != nil {
			t.Fatal(err)
		}
		revision := wantState(t, m, "a", sandbox.Running).Revision
		// The CA of another namespace, as a template that was carried over would have it: the
		// store is changed behind the back of SetNamespaceCA, which would build again.
		other, err := authority.New("other", nil, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		otherKey, err := other.PrivateKey()
		if err != nil {
			t.Fatal(err)
		}
		given := sandbox.CASpec{Certificate: string(other.Certificate()), Key: sandbox.CAKey(otherKey)}
		if _, err := m.authorities.set(sandbox.DefaultNamespace, given); err != nil {
			t.Fatal(err)
		}
		_, err = claimInject(t.Context(), m, "b", injectRef())
		if !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "template python trusts the CA") ||
			!strings.Contains(err.Error(), first.Fingerprint[:12]) || !strings.Contains(err.Error(), other.Fingerprint()[:12]) || !strings.Contains(err.Error(), "OU=other") {
			t.Errorf("a claim of a template with another CA: %v", err)
		}
		if _, err := m.SetNamespaceCA(t.Context(), sandbox.DefaultNamespace, given); err != nil {
			t.Fatal(err)
		}
		n.wantValue(t, m, "a", canary, "the sandbox trusts the CA "+first.Fingerprint[:12])
		if h := n.hosts(t, m, "a")[0]; h.Certificate != nil || h.Key != "" {
			t.Error("a certificate was signed that the sandbox does not trust")
		}
		applyTrusting(t, m) // the pool follows
		b, err := claimInject(t.Context(), m, "b", injectRef())
		if err != nil || b.Revision == revision || b.TrustedCA != other.Fingerprint() {
			t.Fatalf("%+v, %v", b, err)
		}
		n.wantValue(t, m, "b", canary, "")
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		n = newNetwork()
		m = daemon(t, dir, h, func(c *Config) { c.Network = n })
		<-m.adopted
		if again, err := m.NamespaceCA(t.Context(), sandbox.DefaultNamespace); err != nil || again.Fingerprint != other.Fingerprint() || !again.Created.After(first.Created.Add(-time.Second)) {
			t.Errorf("after a restart: %+v, %v", again, err)
		}
		n.wantValue(t, m, "b", canary, "")
	})
}

// TestInjectTakesWhatFits: a waiting sandbox that trusts an earlier CA is not given to a claim
// that needs the present one.
func TestInjectTakesWhatFits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		m := trusting(t, t.TempDir(), nodetest.NewHost(t), n)
		defer func() { _ = m.Close() }()
		p := m.pools[key("pool")]
		p.mu.Lock()
		old, trusted := p.current, p.current.build.TrustedCA
		p.mu.Unlock()
		empty, err := p.open(t.Context(), old.build, old.spec, 0)
		if err != nil {
			t.Fatal(err)
		}
		p.mu.Lock()
		old.build.TrustedCA = "that of another namespace"
		p.older, p.current = []*stock{old}, empty
		p.mu.Unlock()
		s, err := claimInject(t.Context(), m, "a", injectRef())
		if err != nil || s.TrustedCA != trusted {
			t.Errorf("%+v, %v", s, err)
		}
		if s, err = claimInject(t.Context(), m, "b"); err != nil || s.TrustedCA != old.build.TrustedCA {
			t.Errorf("without injected secrets what waits is not taken: %+v, %v", s, err)
		}
	})
}

// TestCertificatesAreRenewed: a sandbox that runs for longer than a certificate is valid is
// shown others.
func TestCertificatesAreRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		m := trusting(t, t.TempDir(), nodetest.NewHost(t), n)
		defer func() { _ = m.Close() }()
		if _, err := claimInject(t.Context(), m, "a", injectRef()); err != nil {
			t.Fatal(err)
		}
		for range 100 {
			time.Sleep(24*time.Hour + time.Minute)
			synctest.Wait()
			leaf, err := x509.ParseCertificate(n.hosts(t, m, "a")[0].Certificate)
			if err != nil || time.Until(leaf.NotAfter) < 80*24*time.Hour {
				t.Fatalf("it ends in %v, %v", time.Until(leaf.NotAfter), err)
			}
		}
		n.wantValue(t, m, "a", canary, "")
	})
}

// TestInjectIsNotLogged: the log has who claimed what, and no value.
func TestInjectIsNotLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		n := newNetwork()
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) {
			c.Network, c.Log = n, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		})
		applyTrusting(t, m)
		if _, err := m.ApplySecret(t.Context(), key("llm"), sandbox.SecretData{"API_KEY": []byte(canary)}); err != nil {
			t.Fatal(err)
		}
		s, err := claimInject(as(t, "alice"), m, "a", injectRef())
		if err != nil {
			t.Fatal(err)
		}
		n.refuse = fmt.Errorf("the network is away")
		if _, err := m.SetSecret(t.Context(), key("llm"), sandbox.SecretData{"API_KEY": []byte(canary + "2")}); err != nil {
			t.Errorf("a secret is not set while the network is away: %v", err)
		}
		j, _ := n.of(t, m, "a")
		shown := fmt.Sprintf("%v %+v %#v", s, s, j.Injections)
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"requests of a sandbox get a secret", "secret=llm", "host=api.example.org", "principal=alice", "when their network is back"} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("the log has no %q:\n%s", want, log.String())
			}
		}
		if strings.Contains(log.String()+shown, canary) {
			t.Error("the value is shown")
		}
	})
}
