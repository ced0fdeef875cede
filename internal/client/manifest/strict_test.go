package manifest

import (
	"strings"
	"testing"

	"agentrun.dev/internal/sandbox"
)

// TestPlaces: an error names the position of the problem in the document, and for an
// unknown field the known field that is most similar.
func TestPlaces(t *testing.T) {
	doc := func(kind, spec string) string {
		return "apiVersion: agentrun.dev/v1alpha1\nkind: " + kind + "\nmetadata: {name: x}\nspec: " + spec + "\n"
	}
	for name, tt := range map[string]struct{ yaml, want string }{
		"in a list": {
			doc("SandboxTemplate", `{image: a, volumes: [{name: v}, {name: w, readOnly: true}]}`),
			"document 1: SandboxTemplate x: spec.volumes[1].readOnly: unknown field; there are name, mountPath, size, forkPolicy",
		},
		"a slip":        {doc("SandboxTemplate", `{image: a, wrokdir: /}`), "spec.wrokdir: unknown field; did you mean workdir?"},
		"two":           {doc("SandboxTemplate", `{imag: a, env: [{nam: b}]}`), "spec.env[0].nam: unknown field; did you mean name?; spec.imag: unknown field; did you mean image?"},
		"at the top":    {doc("SandboxPool", "{templateRef: {name: a}}") + "sepc: {}\n", "SandboxPool x: sepc: unknown field; did you mean spec?"},
		"in metadata":   {"apiVersion: agentrun.dev/v1alpha1\nkind: SandboxPool\nmetadata: {name: x, lables: {}}\n", "metadata.lables: unknown field; did you mean labels?"},
		"behind a ref":  {doc("SandboxClaim", `{poolRef: {name: p}, secrets: [{name: s, inject: {hots: a}}]}`), "spec.secrets[0].inject.hots: unknown field; did you mean host?"},
		"a strange one": {doc("SandboxPool", `{"a b\n": 1}`), `spec["a b\n"]: unknown field`},
		"no list":       {doc("SandboxTemplate", `{image: a, init: "x"}`), "spec.init: it is text, and must be a list"},
		"no fields":     {doc("SandboxPool", `{templateRef: p}`), "spec.templateRef: it is text, and must be fields"},
		"no number":     {doc("SandboxPool", `{templateRef: {name: p}, replicas: "many"}`), "spec.replicas: it is text, and must be a whole number"},
		"too large":     {doc("SandboxPool", `{templateRef: {name: p}, replicas: 3000000000}`), "spec.replicas: 3e+09 is not possible: it must be a whole number of at most 32 bits"},
		"no truth":      {doc("SandboxTemplate", `{image: a, trustNamespaceCA: 7}`), "spec.trustNamespaceCA: it is a number, and must be true or false"},
		"no text":       {doc("SandboxTemplate", `{image: [a]}`), "spec.image: it is a list, and must be text"},
		"a quantity":    {doc("SandboxTemplate", `{image: a, resources: {cpu: much}}`), "spec.resources.cpu: quantities"},
		"a duration":    {doc("SandboxClaim", `{poolRef: {name: p}, timeout: soon}`), `spec.timeout: time: invalid duration "soon"`},
		"no duration":   {doc("SandboxClaim", `{poolRef: {name: p}, timeout: 5}`), `spec.timeout: it is a number, which is not possible`},
		"twice":         {doc("SandboxTemplate", "\n  image: a\n  image: b"), `SandboxTemplate x: line 6: key "image" already set in map`},
		"a secret": {
			"apiVersion: v1\nkind: Secret\nmetadata: {name: x}\nstringDta: {k: hunter2}\ndata: {k: hunter2!}\n",
			"Secret x: data.k: illegal base64 data at input byte 7; stringDta: unknown field; did you mean stringData?",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Read(strings.NewReader(tt.yaml), sandbox.DefaultNamespace)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("%v\nshould say\n%s", err, tt.want)
			}
			for _, never := range []string{"JSON", "json:", "hunter2"} {
				if strings.Contains(err.Error(), never) {
					t.Errorf("%v has %s", err, never)
				}
			}
		})
	}
}

// TestManyProblems: the errors of a document with many mistakes are bounded.
func TestManyProblems(t *testing.T) {
	_, err := Unmarshal[struct{}]([]byte(strings.Repeat("a", 200) + ": 1\n" + strings.Repeat("b", 1000) + ": 2\nc: 3\nd: 4\ne: 5\nf: 6\ng: 7\n"))
	if err == nil || strings.Count(err.Error(), "unknown field") != maxProblems || len(err.Error()) > 1000 {
		t.Errorf("%v", err)
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"host", "host", 0}, {"hots", "host", 1}, {"imag", "image", 1}, {"imagee", "image", 1}, {"omage", "image", 1}, {"abcd", "wxyz", 4}} {
		if got := distance(c.a, c.b, 9); got != c.want {
			t.Errorf("%s, %s: %d, not %d", c.a, c.b, got, c.want)
		}
	}
}
