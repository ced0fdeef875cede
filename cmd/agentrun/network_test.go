package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/network/policy"
)

// TestPolicyOptions: flags or a file make a policy, and errors name the flag.
func TestPolicyOptions(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, c := range map[string]struct {
		given policyOptions
		stdin string
		want  string // egress and rules
		says  string
	}{
		"rules":    {given: policyOptions{allow: []string{"A.example.org:443", "udp://203.0.113.7:123"}, deny: []string{"evil.example.com"}}, want: "deny +a.example.org:443 +udp://203.0.113.7:123 -evil.example.com"},
		"egress":   {given: policyOptions{egress: "allow"}, want: "allow"},
		"file":     {given: policyOptions{file: file("good", "egress: deny\nallow: ['*.example.org']\n")}, want: "deny +*.example.org"},
		"stdin":    {given: policyOptions{file: "-"}, stdin: "egress: allow", want: "allow"},
		"nothing":  {says: "agentrun network delete removes it"},
		"both":     {given: policyOptions{egress: "deny", file: "-"}, says: "leave --egress, --allow and --deny out"},
		"no rule":  {given: policyOptions{allow: []string{"a.example", "*"}}, says: "--allow[1]: "},
		"no deny":  {given: policyOptions{deny: []string{"a b"}}, says: "--deny[0]: "},
		"neither":  {given: policyOptions{egress: "some"}, says: "--egress: "},
		"no file":  {given: policyOptions{file: filepath.Join(dir, "none")}, says: "no such file"},
		"no YAML":  {given: policyOptions{file: file("text", "a: [")}, says: "--file: "},
		"no field": {given: policyOptions{file: file("field", "egress: deny\nblock: [a.example]\n")}, says: "block"},
		"empty":    {given: policyOptions{file: file("empty", "# nothing\n")}, says: "is empty"},
		"large":    {given: policyOptions{file: "-"}, stdin: strings.Repeat("#", maxPolicyFile+1), says: "larger than"},
	} {
		p, err := c.given.read(strings.NewReader(c.stdin))
		if c.says != "" {
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		words := []string{string(p.Egress)}
		for _, r := range policy.Texts(p.Allow) {
			words = append(words, "+"+r)
		}
		for _, r := range policy.Texts(p.Deny) {
			words = append(words, "-"+r)
		}
		if got := strings.Join(words, " "); err != nil || got != c.want {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
}

// TestPrintNetworkLog: text that a sandbox has chosen cannot control a terminal.
// Only refusals are printed if only they are requested.
func TestPrintNetworkLog(t *testing.T) {
	entries := []rest.NetworkLogEntry{
		{Time: time.Now(), Outcome: "closed", Protocol: "tcp", Name: "a.example", Address: "192.0.2.1:443", Sent: 1, Received: 2, Rule: "a.example:443"},
		{Time: time.Now(), Outcome: "refused", Protocol: "dns", Name: "\x1b[2Jevil\n.example", Repeated: 2, Reason: "no rule"},
	}
	var out bytes.Buffer
	if err := (&networkLogOptions{}).print(&out, entries); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 || strings.ContainsRune(out.String(), '\x1b') || !strings.Contains(lines[1], "refused x3") || !strings.Contains(lines[1], "?[2Jevil?.example") {
		t.Errorf("%q", lines)
	}
	out.Reset()
	if err := (&networkLogOptions{refused: true, json: true}).print(&out, entries); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, `"outcome":"refused"`) {
		t.Errorf("%s", got)
	}
}

// TestPolicyText: a policy on one line.
func TestPolicyText(t *testing.T) {
	p := &rest.NetworkPolicy{Egress: rest.NetworkPolicyEgressDeny, Allow: []string{"a.example:443", "b.example"}, Deny: []string{"c.example"}}
	if got := policyText(p); got != "egress deny; allow a.example:443, b.example; deny c.example" {
		t.Errorf("%s", got)
	}
	if got := policyText(nil); got != "" {
		t.Errorf("%s", got)
	}
}

// TestPrintPolicies: the output can be read again as a policy.
func TestPrintPolicies(t *testing.T) {
	s := rest.Sandbox{
		NetworkPolicy: &rest.NetworkPolicy{Egress: rest.NetworkPolicyEgressDeny, Allow: []string{"a.example.org:443"}},
		NetworkBounds: []rest.NetworkPolicy{{Egress: rest.NetworkPolicyEgressAllow}},
	}
	var out bytes.Buffer
	if err := printPolicies(&out, s, false); err != nil {
		t.Fatal(err)
	}
	const want = `# Each of these policies must allow a connection.
networkBounds:
- egress: allow
networkPolicy:
  allow:
  - a.example.org:443
  egress: deny
`
	if out.String() != want {
		t.Errorf("%s", &out)
	}
}
