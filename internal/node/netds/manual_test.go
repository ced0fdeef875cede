package netds

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/authority"
)

// TestManual: the settings that docs/network.md shows are settings, and all of them.
func TestManual(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "network.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "## Settings of a node\n")
	_, rest, begins := strings.Cut(rest, "```yaml\n")
	example, _, ends := strings.Cut(rest, "```\n")
	if !found || !begins || !ends {
		t.Fatal("docs/network.md has no example of settings")
	}
	dir := t.TempDir()
	path, roots := filepath.Join(dir, "network.yaml"), filepath.Join(dir, "roots.pem")
	ca, err := authority.New("x", nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	example = strings.NewReplacer("ech: false", "ech: true", "/etc/agentrun/roots.pem", roots).Replace(example)
	if err := errors.Join(os.WriteFile(roots, ca.Certificate(), 0o600), os.WriteFile(path, []byte(example), 0o600)); err != nil {
		t.Fatal(err)
	}
	s, err := OpenSettings(path, "/nonexistent")
	if err != nil {
		t.Fatal(err)
	}
	v := s.Now()
	if len(v.Upstreams) != 2 || v.Upstreams[1] != netip.MustParseAddrPort("[2001:db8::53]:5353") || len(v.ClosedRanges) != 2 || !v.ECH || string(v.Roots) != string(ca.Certificate()) {
		t.Errorf("%+v", v)
	}
	if d := v.InternalDomains; len(d) != 1 || d[0].Domain != "svc.cluster.local" || d[0].Upstreams[0] != netip.MustParseAddrPort("10.96.0.10:53") {
		t.Errorf("%+v", d)
	}
	if rules := policy.Texts(v.BuildNetwork.Allow); len(rules) != 3 || rules[0] != "pypi.org:443" {
		t.Errorf("%v", rules)
	}
}
