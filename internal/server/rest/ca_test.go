package rest

import (
	"strings"
	"testing"

	"agentrun.dev/api/rest"
)

// TestCARoutes: a CA is made, set and shown, never its key.
func TestCARoutes(t *testing.T) {
	const canary = "key-canary"
	n := newNode(t)
	n.do("GET", v1+"/ca", nil).refused(404, "not_found")
	made := as[rest.NamespaceCA](n.do("PUT", v1+"/ca", rest.CASpec{Names: []string{"openai.com"}}).ok(200))
	if len(made.Names) != 1 || made.Names[0] != "openai.com" || !strings.Contains(made.Certificate, "BEGIN CERTIFICATE") {
		t.Errorf("%+v", made)
	}
	shown := n.do("GET", v1+"/ca", nil).ok(200)
	if got := as[rest.NamespaceCA](shown); got.Fingerprint != made.Fingerprint || strings.Contains(string(shown.body), "PRIVATE KEY") {
		t.Errorf("%s", shown.body)
	}
	n.do("GET", "/v1/namespaces/other/ca", nil).refused(404, "not_found")
	n.do("DELETE", v1+"/ca", nil).refused(405, "method_not_allowed")
	for name, body := range map[string]string{
		"another field":    `{"` + canary + `": 1}`,
		"a key of no text": `{"certificate": "x", "key": {"` + canary + `": 1}}`,
		"no key at all":    `{"certificate": "x"}`,
		"no certificate":   `{"key": "` + canary + `"}`,
		"no PEM":           `{"certificate": "x", "key": "` + canary + `"}`,
		"a wildcard":       `{"names": ["*.openai.com"]}`,
	} {
		res := n.do("PUT", v1+"/ca", body)
		res.refused(400, "invalid")
		if strings.Contains(string(res.body), canary) {
			t.Errorf("%s: the answer shows it: %s", name, res.body)
		}
	}
}
