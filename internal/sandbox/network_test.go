package sandbox

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"agentrun.dev/internal/network/policy"
)

// plain is a template without a word about the network, and its revision in versions
// that knew none.
var plain = TemplateSpec{
	Image: "python:3.12-slim", Init: []string{"pip install numpy"}, Env: Env{"A": "b"}, Workdir: "/workspace", User: "agent",
	MilliCPUs: DefaultMilliCPUs, Memory: DefaultMemory, Disk: 1 << 30, Ready: &ReadyCheck{Port: 8080}, Warmup: &Program{Language: "python", Text: "import json"},
}

const plainRevision = "5fa2487253efba22"

// TestRevisionOfNetwork: settings that a snapshot depends on change the revision.
// The policy of the sandboxes does not.
func TestRevisionOfNetwork(t *testing.T) {
	if got := plain.Digest(); got != plainRevision {
		t.Errorf("the revision of a template that says nothing about the network is %s, and was %s", got, plainRevision)
	}
	p := parsed(t, "deny", "a.example:443")
	with := func(change func(*TemplateSpec)) TemplateSpec { s := plain; change(&s); return s }
	if s := with(func(s *TemplateSpec) { s.NetworkPolicy = p }); s.Digest() != plainRevision || s.NetworkPolicy != p {
		t.Errorf("the revision with a policy is %s, and the policy %v", s.Digest(), s.NetworkPolicy)
	}
	for name, s := range map[string]TemplateSpec{
		"buildNetwork": with(func(s *TemplateSpec) { s.BuildNetwork = p }),
		"network":      with(func(s *TemplateSpec) { s.Network = NetworkNone }),
	} {
		if s.Digest() == plainRevision {
			t.Errorf("%s does not change the revision", name)
		}
	}
}

func parsed(t *testing.T, egress string, allow ...string) *policy.Policy {
	t.Helper()
	p, err := ParseNetworkPolicy("networkPolicy", egress, allow, []string{"evil.example"})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestNetworkInJournal: a template is read from the journal as it was written.
func TestNetworkInJournal(t *testing.T) {
	s := plain
	s.NetworkPolicy, s.BuildNetwork = parsed(t, "deny", "*.a.example", "[2001:db8::/32]:443"), parsed(t, "allow")
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var back TemplateSpec
	if err := json.Unmarshal(b, &back); err != nil || !reflect.DeepEqual(back, s) {
		t.Errorf("%s is read as %+v: %v", b, back, err)
	}
	if err := json.Unmarshal([]byte(strings.Replace(string(b), "evil.example", "evil_example", 1)), &back); err == nil {
		t.Error("a rule that no parser would take is read")
	}
}

// TestValidateNetwork: an error names the invalid field.
func TestValidateNetwork(t *testing.T) {
	with := func(change func(*TemplateSpec)) TemplateSpec { s := plain; change(&s); return s }
	claim := func(p *policy.Policy) ClaimSpec { return ClaimSpec{Pool: "p", NetworkPolicy: p} }
	fork := func(p *policy.Policy) ForkSpec { return ForkSpec{Source: "s", Replicas: 1, NetworkPolicy: p} }
	closed, byHand := parsed(t, "deny"), &policy.Policy{Egress: "open"}
	for name, c := range map[string]struct {
		of   interface{ Validate() error }
		want string // empty is valid
	}{
		"template":          {plain, ""},
		"template, deny":    {with(func(s *TemplateSpec) { s.NetworkPolicy = closed }), ""},
		"template, none":    {with(func(s *TemplateSpec) { s.Network = NetworkNone }), ""},
		"claim":             {claim(nil), ""},
		"fork":              {fork(nil), ""},
		"another mode":      {with(func(s *TemplateSpec) { s.Network = "host" }), `network: "host"`},
		"none and a policy": {with(func(s *TemplateSpec) { s.Network, s.NetworkPolicy = NetworkNone, closed }), "network: "},
		"none and a build":  {with(func(s *TemplateSpec) { s.Network, s.BuildNetwork = NetworkNone, closed }), "network: "},
		"template, by hand": {with(func(s *TemplateSpec) { s.NetworkPolicy = byHand }), "networkPolicy.egress: \"open\""},
		"build, by hand":    {with(func(s *TemplateSpec) { s.BuildNetwork = byHand }), "buildNetwork.egress: \"open\""},
		"claim, by hand":    {claim(byHand), "networkPolicy.egress: \"open\""},
		"fork, by hand":     {fork(byHand), "networkPolicy.egress: \"open\""},
		"no children":       {ForkSpec{Source: "s"}, "replicas"},
		"too many children": {ForkSpec{Source: "s", Replicas: MaxFork + 1}, "replicas"},
		"template, rules":   {with(func(s *TemplateSpec) { s.NetworkPolicy = parsed(t, "deny", "a.example") }), ""},
		"template, allow":   {with(func(s *TemplateSpec) { s.NetworkPolicy = parsed(t, "allow") }), ""},
		"template, build":   {with(func(s *TemplateSpec) { s.BuildNetwork = closed }), ""},
		"claim, deny":       {claim(closed), ""},
		"fork, deny":        {fork(closed), ""},
	} {
		err := c.of.Validate()
		if c.want == "" && err != nil || c.want != "" && (!HasCode(err, CodeInvalid) || !strings.HasPrefix(err.Error(), c.want)) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
}
