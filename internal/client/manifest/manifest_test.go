package manifest

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

const everything = `
# What a new user writes.
apiVersion: agentrun.dev/v1alpha1
kind: SandboxTemplate
metadata:
  name: python-agent
spec:
  image: python:3.12-slim
  init:
    - "echo hello > /workspace/hello"
  env:
    - name: LANG
      value: C.UTF-8
  workdir: /workspace
  user: agent
  resources: {cpu: "1500m", memory: "512Mi", disk: 2Gi}
  ready: {port: 8080, timeout: 2m}
  warmup:
    code: import json
  networkPolicy:
    egress: deny
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxPool
metadata: {name: python-agent-pool, namespace: team}
spec:
  templateRef:
    name: python-agent
  replicas: 10
  snapshotAfter: Ready
---
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxClaim
metadata: {name: agent-session-1}
spec:
  poolRef: {name: python-agent-pool}
  env: [{name: SESSION_ID, value: abc-123}]
  metadata: {owner: me}
  timeout: 10m
  idleTimeout: 90s
  onTimeout: hibernate
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxFork
metadata: {name: parallel-attempt}
spec:
  sourceRef: {name: agent-session-1}
  replicas: 3
`

func TestRead(t *testing.T) {
	got, err := Read(strings.NewReader(everything), sandbox.DefaultNamespace)
	if err != nil {
		t.Fatal(err)
	}
	key := func(ns, name string) sandbox.Key {
		return sandbox.Key{Namespace: sandbox.Namespace(ns), Name: sandbox.Name(name)}
	}
	want := []Object{
		{Key: key("default", "python-agent"), Template: &sandbox.TemplateSpec{
			Image: "python:3.12-slim", Init: []string{"echo hello > /workspace/hello"}, Env: sandbox.Env{"LANG": "C.UTF-8"},
			Workdir: "/workspace", User: "agent", MilliCPUs: 1500, Memory: 512 << 20, Disk: 2 << 30,
			Ready:  &sandbox.ReadyCheck{Port: 8080, Timeout: 2 * time.Minute},
			Warmup: &sandbox.Program{Language: "python", Text: "import json"},

			NetworkPolicy: &policy.Policy{Egress: policy.DenyByDefault},
		}},
		{Key: key("team", "python-agent-pool"), Pool: &sandbox.PoolSpec{Template: "python-agent", Replicas: 10, Stage: sandbox.AfterReady}},
		{Key: key("default", "agent-session-1"), Claim: &sandbox.ClaimSpec{
			Pool: "python-agent-pool", Env: sandbox.Env{"SESSION_ID": "abc-123"}, Metadata: map[string]string{"owner": "me"},
			Lifetime: sandbox.Lifetime{Timeout: 10 * time.Minute, IdleTimeout: 90 * time.Second, OnTimeout: sandbox.TimeoutHibernate},
		}},
		{Key: key("default", "parallel-attempt"), Fork: &sandbox.ForkSpec{Source: "agent-session-1", Replicas: 3}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read\n%+v\nnot\n%+v", got, want)
	}
}

// TestRefuses: a field that is unknown or has no effect is an error that names
// the field.
func TestRefuses(t *testing.T) {
	doc := func(kind, spec string) string {
		return "apiVersion: agentrun.dev/v1alpha1\nkind: " + kind + "\nmetadata: {name: x}\nspec: " + spec + "\n"
	}
	for name, tt := range map[string]struct{ yaml, want string }{
		"volumes":    {doc("SandboxTemplate", `{image: a, volumes: [{name: w, size: 5Gi, forkPolicy: Snapshot}]}`), "volumes"},
		"allow":      {doc("SandboxTemplate", `{image: a, networkPolicy: {egress: deny, allow: ["a.example", "x:443:1"]}}`), "networkPolicy.allow[1]"},
		"deny":       {doc("SandboxTemplate", `{image: a, networkPolicy: {deny: ["*"]}}`), "networkPolicy.deny[0]"},
		"build":      {doc("SandboxTemplate", `{image: a, buildNetwork: {allow: ["*"]}}`), "buildNetwork.allow[0]"},
		"claim":      {doc("SandboxClaim", `{poolRef: {name: p}, networkPolicy: {allow: ["*"]}}`), "networkPolicy.allow[0]"},
		"fork":       {doc("SandboxFork", `{sourceRef: {name: p}, networkPolicy: {egress: some}}`), "networkPolicy.egress"},
		"egress":     {doc("SandboxTemplate", `{image: a, networkPolicy: {egress: all}}`), "networkPolicy.egress"},
		"disk":       {doc("SandboxTemplate", `{image: a, resources: {disk: -1Gi}}`), "resources.disk"},
		"no disk":    {doc("SandboxTemplate", `{image: a, resources: {disk: "0.3"}}`), "resources.disk"},
		"unknown":    {doc("SandboxTemplate", `{image: a, colour: red}`), "colour"},
		"nested":     {doc("SandboxTemplate", `{image: a, resources: {gpu: 1}}`), "gpu"},
		"twice":      {doc("SandboxTemplate", "{image: a, image: b}"), "image"},
		"memory":     {doc("SandboxTemplate", `{image: a, resources: {memory: "0.3"}}`), "resources.memory"},
		"port":       {doc("SandboxTemplate", `{image: a, ready: {port: 70000}}`), "ready.port"},
		"env":        {doc("SandboxTemplate", `{image: a, env: [{name: A}, {name: A}]}`), "twice"},
		"quantity":   {doc("SandboxTemplate", `{image: a, resources: {cpu: much}}`), "quantities"},
		"inherit":    {doc("SandboxFork", `{sourceRef: {name: p}, allowSecretInheritance: true}`), "allowSecretInheritance"},
		"no source":  {doc("SandboxFork", `{replicas: 2}`), "sourceRef"},
		"no pool":    {doc("SandboxClaim", `{}`), "poolRef"},
		"bad ref":    {doc("SandboxPool", `{templateRef: {name: ../x}}`), "templateRef"},
		"duration":   {doc("SandboxClaim", `{poolRef: {name: p}, timeout: soon}`), "soon"},
		"kind":       {doc("SandboxRocket", "{}"), "SandboxRocket"},
		"version":    {"apiVersion: agentrun.dev/v9\nkind: SandboxPool\nmetadata: {name: x}\n", "agentrun.dev/v9"},
		"no name":    {"apiVersion: agentrun.dev/v1alpha1\nkind: SandboxPool\n", "metadata.name"},
		"traversal":  {"apiVersion: agentrun.dev/v1alpha1\nkind: SandboxPool\nmetadata: {name: ../../etc}\n", "metadata.name"},
		"namespace":  {"apiVersion: agentrun.dev/v1alpha1\nkind: SandboxPool\nmetadata: {name: x, namespace: A/B}\n", "namespace"},
		"not YAML":   {"{{{", "YAML"},
		"a list":     {"- a\n- b\n", "YAML"},
		"too large":  {strings.Repeat("# x\n", maxBytes/4+1), "larger"},
		"too many":   {strings.Repeat(doc("SandboxFork", "{sourceRef: {name: a}}")+"---\n", maxObjects+1), "more than"},
		"second doc": {doc("SandboxFork", "{sourceRef: {name: a}}") + "---\n" + doc("SandboxFork", "{}"), "document 2"},
	} {
		if got, err := Read(strings.NewReader(tt.yaml), sandbox.DefaultNamespace); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %+v, %v; the error should name %q", name, got, err, tt.want)
		}
	}
	if got, err := Read(strings.NewReader("# nothing\n---\n"), sandbox.DefaultNamespace); err != nil || len(got) != 0 {
		t.Errorf("nothing: %v, %v", got, err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(everything)
	f.Fuzz(func(_ *testing.T, text string) {
		_, _ = Read(strings.NewReader(text), sandbox.DefaultNamespace)
	})
}
