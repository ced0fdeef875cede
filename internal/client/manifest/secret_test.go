package manifest

import (
	"reflect"
	"strings"
	"testing"

	"agentrun.dev/internal/sandbox"
)

const withSecrets = `
apiVersion: v1
kind: Secret
metadata: {name: llm, namespace: team}
type: Opaque
data:
  API_KEY: c2stbGl2ZQ==
  both: b2xk
stringData:
  both: new
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxClaim
metadata: {name: c}
spec:
  poolRef: {name: p}
  secrets:
    - {name: llm, key: API_KEY}
    - {name: llm, key: both, env: BOTH}
    - {name: mine, secretRef: {name: db, key: PASSWORD}}
    - {secretRef: {name: db, key: USER}, env: DB_USER}
`

func TestReadSecrets(t *testing.T) {
	got, err := Read(strings.NewReader(withSecrets), sandbox.DefaultNamespace)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Kind() != "Secret" || got[0].Key != (sandbox.Key{Namespace: "team", Name: "llm"}) {
		t.Fatalf("%+v", got)
	}
	if want := (sandbox.SecretData{"API_KEY": []byte("sk-live"), "both": []byte("new")}); !reflect.DeepEqual(got[0].Secret, want) {
		t.Errorf("the values are %d others", len(got[0].Secret))
	}
	want := []sandbox.SecretRef{
		{Secret: "llm", Key: "API_KEY"}, {Secret: "llm", Key: "both", Env: "BOTH"},
		{Secret: "db", Key: "PASSWORD"}, {Secret: "db", Key: "USER", Env: "DB_USER"},
	}
	if refs := got[1].Claim.Secrets; !reflect.DeepEqual(refs, want) {
		t.Errorf("%+v, not %+v", refs, want)
	}
}

// TestRefusesSecrets: errors name the problem, and never contain a value.
func TestRefusesSecrets(t *testing.T) {
	const canary = "c2stbGl2ZS1jYW5hcnk"
	secret := func(rest string) string { return "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n" + rest }
	claim := func(entry string) string {
		return "apiVersion: agentrun.dev/v1alpha1\nkind: SandboxClaim\nmetadata: {name: x}\nspec: {poolRef: {name: p}, secrets: [" + entry + "]}\n"
	}
	for name, tt := range map[string]struct{ yaml, want string }{
		"nothing":      {secret(""), "data"},
		"base64":       {secret("data: {K: '" + canary + "!'}\n"), "base64"},
		"type":         {secret("type: kubernetes.io/tls\ndata: {K: eA==}\n"), "type"},
		"unknown":      {secret("immutable: true\ndata: {K: eA==}\n"), "immutable"},
		"a map":        {secret("stringData: {K: {" + canary + ": 1}}\n"), "stringData"},
		"twice":        {secret("stringData: {K: a, K: " + canary + "}\n"), "K"},
		"version":      {"apiVersion: v2\nkind: Secret\nmetadata: {name: s}\n", "v2"},
		"no key":       {claim("{name: s}"), "secrets[0]: key"},
		"no ref key":   {claim("{secretRef: {name: s}}"), "secrets[0]: key"},
		"two keys":     {claim("{name: s, key: K, secretRef: {name: s, key: K}}"), "secrets[0]: key"},
		"two names":    {claim("{name: s, secretRef: {name: a, key: A}}, {name: s, secretRef: {name: a, key: B}}"), "secrets[1]"},
		"bad name":     {claim("{name: ../s, key: K}"), "secrets[0]"},
		"bad inject":   {claim("{name: s, key: K, inject: {host: a.example, headers: X}}"), "headers"},
		"a value":      {claim("{name: s, key: K, value: x}"), "value"},
		"no such kind": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: s}\n", "apiVersion"},
	} {
		got, err := Read(strings.NewReader(tt.yaml), sandbox.DefaultNamespace)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %+v, %v; the error should name %q", name, got, err, tt.want)
		} else if strings.Contains(err.Error(), canary) {
			t.Errorf("%s: the error shows the value: %v", name, err)
		}
	}
}
