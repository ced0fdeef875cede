package rest

import (
	"slices"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
)

// pool makes a template and a pool, which makes sandboxes when they are claimed.
func (n *testNode) pool() {
	n.t.Helper()
	n.do("PUT", v1+"/templates/t", rest.TemplateSpec{Image: "python", Memory: 64 << 20}).ok(200)
	n.do("PUT", v1+"/pools/p", rest.PoolSpec{Template: "t"}).ok(200)
	n.Eventually(func() bool { return as[rest.Pool](n.do("GET", v1+"/pools/p", nil).ok(200)).Phase == rest.PhaseReady })
}

// TestSecretRoutes: written values are never read.
func TestSecretRoutes(t *testing.T) {
	const canary = "sk-live-canary"
	n := newNode(t)
	s := as[rest.Secret](n.do("PUT", v1+"/secrets/s", rest.SecretValues{Data: map[string][]byte{"A": []byte(canary)}, StringData: map[string]string{"B": canary}}).ok(200))
	if s.Name != "s" || !slices.Equal(s.Keys, []string{"A", "B"}) {
		t.Errorf("%+v", s)
	}
	s = as[rest.Secret](n.do("PATCH", v1+"/secrets/s", rest.SecretValues{StringData: map[string]string{"C": canary}}).ok(200))
	if !slices.Equal(s.Keys, []string{"A", "B", "C"}) {
		t.Errorf("%+v", s)
	}
	n.do("PATCH", v1+"/secrets/t", rest.SecretValues{StringData: map[string]string{"C": "x"}}).ok(200)
	page := as[rest.SecretList](n.do("GET", v1+"/secrets?limit=1", nil).ok(200))
	if len(page.Items) != 1 || page.Next != "s" {
		t.Errorf("%+v", page)
	}
	if page = as[rest.SecretList](n.do("GET", v1+"/secrets?after=s", nil).ok(200)); len(page.Items) != 1 || page.Items[0].Name != "t" {
		t.Errorf("%+v", page)
	}
	n.do("GET", "/v1/namespaces/other/secrets/s", nil).refused(404, "not_found")
	n.do("GET", v1+"/secrets/none", nil).refused(404, "not_found")
	n.do("POST", v1+"/secrets/s", "{}").refused(405, "method_not_allowed")
	for name, body := range map[string]string{
		"a value that is none":  `{"stringData": {"A": 5` + canary + `}}`,
		"no base64":             `{"data": {"A": "` + canary + `!"}}`,
		"an object":             `{"stringData": {"A": {"` + canary + `": 1}}}`,
		"another field":         `{"` + canary + `": "x"}`,
		"a string":              `"` + canary + `"`,
		"a bad key":             `{"stringData": {"a b": "` + canary + `"}}`,
		"nothing":               `{}`,
		"in both":               `{"data": {"A": ""}, "stringData": {"A": "` + canary + `"}}`,
		"more than one message": `{"stringData": {"A": "` + strings.Repeat(canary, 4000) + `"}}`,
	} {
		res := n.do("PUT", v1+"/secrets/s", body)
		res.refused(400, "invalid")
		if strings.Contains(string(res.body), canary) {
			t.Errorf("%s: the answer shows it: %s", name, res.body)
		}
	}
	n.do("DELETE", v1+"/secrets/s", nil).ok(204)
	n.do("DELETE", v1+"/secrets/s", nil).refused(404, "not_found")
}

// TestHolderForks: the principal that claimed with secrets forks, others are
// refused, and both can see why.
func TestHolderForks(t *testing.T) {
	n := newNode(t)
	n.pool()
	bob := n.with(n.key(access.RoleUser, sandbox.DefaultNamespace))
	n = n.with(n.key(access.RoleUser, sandbox.DefaultNamespace))
	n.do("PUT", v1+"/secrets/s", rest.SecretValues{StringData: map[string]string{"K": "value-of-k"}}).ok(200)
	s := as[rest.Sandbox](n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "a", Pool: "p", Secrets: []rest.SecretRef{{Name: "s", Key: "K", Env: "E"}}}).ok(201))
	alice := s.SecretsBy
	if !strings.HasPrefix(alice, "key:") || !slices.Equal(s.Secrets, []rest.SecretRef{{Name: "s", Key: "K", Env: "E"}}) {
		t.Errorf("%+v", s)
	}
	ran := as[rest.ExecResult](n.do("POST", v1+"/sandboxes/a/execs", rest.ExecRequest{Shell: "echo $E"}).ok(200))
	if strings.TrimSpace(ran.Stdout) != "value-of-k" {
		t.Errorf("%+v", ran)
	}
	bob.do("POST", v1+"/sandboxes/a/forks", rest.ForkCreate{Name: "f", Replicas: 1}).refused(403, "permission_denied")
	if f := as[rest.Fork](n.do("POST", v1+"/sandboxes/a/forks", rest.ForkCreate{Name: "f", Replicas: 1}).ok(201)); !f.HoldsSecrets || f.By != alice {
		t.Errorf("%+v", f)
	}
	for _, bad := range []rest.SecretRef{{Name: "s"}, {Name: "../s", Key: "K"}, {Name: "s", Key: "K", Env: "a b"}} {
		n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "b", Pool: "p", Secrets: []rest.SecretRef{bad}}).refused(400, "invalid")
	}
	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "b", Pool: "p", Secrets: []rest.SecretRef{{Name: "t", Key: "K"}}}).refused(404, "not_found")
}

func TestQuotaRoutes(t *testing.T) {
	n := newNode(t)
	n.pool()
	if q := as[rest.Quota](n.do("GET", v1+"/quota", nil).ok(200)); q.Namespace != "default" || q.Spec != (rest.QuotaSpec{}) {
		t.Errorf("%+v", q)
	}
	n.do("PUT", v1+"/quota", rest.QuotaSpec{Sandboxes: 1, Memory: 1 << 30}).ok(200)
	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "a", Pool: "p"}).ok(201)
	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "b", Pool: "p"}).refused(503, "insufficient_capacity")
	// The storage is that of the pool's build.
	if q := as[rest.Quota](n.do("GET", v1+"/quota", nil).ok(200)); q.Used.Sandboxes != 1 || q.Used.Memory != 64<<20 || q.Used.Storage == 0 || q.Spec.Sandboxes != 1 {
		t.Errorf("%+v", q)
	}
	for _, bad := range []string{`{"memory": -1}`, `{"sandboxes": -1}`, `{"cpus": 1}`, `[]`} {
		n.do("PUT", v1+"/quota", bad).refused(400, "invalid")
	}
	n.do("DELETE", v1+"/quota", nil).ok(204)
	n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "b", Pool: "p"}).ok(201)
	n.do("GET", "/v1/namespaces/NOT/quota", nil).refused(400, "invalid")
}
