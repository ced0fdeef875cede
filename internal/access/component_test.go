package access

import (
	"crypto/x509"
	"net/url"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/sandbox"
)

// withURIs is a certificate with URIs, as x509 parses them.
func withURIs(t *testing.T, uris ...string) *x509.Certificate {
	t.Helper()
	c := &x509.Certificate{}
	for _, u := range uris {
		parsed, err := url.Parse(u)
		if err != nil {
			t.Fatal(err)
		}
		c.URIs = append(c.URIs, parsed)
	}
	return c
}

// TestComponentOf: a certificate gives a role by its only URI, in one form.
func TestComponentOf(t *testing.T) {
	for uri, want := range map[string]string{
		"spiffe://agentrun.dev/controller/main":                   "controller:main",
		"spiffe://agentrun.dev/gateway/gateway-7f9c":              "gateway:gateway-7f9c",
		"spiffe://agentrun.dev/node/ip-10-0-0-1.eu-1.compute.int": "node:ip-10-0-0-1.eu-1.compute.int",
	} {
		c, err := ComponentOf(withURIs(t, uri))
		if err != nil || c.String() != want || c.URI().String() != uri {
			t.Errorf("%s: %q, %v", uri, c, err)
		}
	}
	for name, uris := range map[string][]string{
		"none":               {},
		"two roles":          {"spiffe://agentrun.dev/controller/a", "spiffe://agentrun.dev/node/a"},
		"the same twice":     {"spiffe://agentrun.dev/node/a", "spiffe://agentrun.dev/node/a"},
		"one and another":    {"spiffe://agentrun.dev/node/a", "https://example.com/"},
		"another scheme":     {"https://agentrun.dev/controller/a"},
		"another cluster":    {"spiffe://example.com/controller/a"},
		"a port":             {"spiffe://agentrun.dev:443/controller/a"},
		"a user":             {"spiffe://root@agentrun.dev/controller/a"},
		"a query":            {"spiffe://agentrun.dev/controller/a?b"},
		"an empty query":     {"spiffe://agentrun.dev/controller/a?"},
		"a fragment":         {"spiffe://agentrun.dev/controller/a#b"},
		"an escape":          {"spiffe://agentrun.dev/controller/%61"},
		"an escaped slash":   {"spiffe://agentrun.dev/controller%2Fa"},
		"capitals":           {"spiffe://agentrun.dev/Controller/a"},
		"capitals elsewhere": {"SPIFFE://AgentRun.dev/controller/a"},
		"no name":            {"spiffe://agentrun.dev/controller/"},
		"no role":            {"spiffe://agentrun.dev/a"},
		"too long a path":    {"spiffe://agentrun.dev/controller/a/b"},
		"an empty part":      {"spiffe://agentrun.dev//controller/a"},
		"the role of a key":  {"spiffe://agentrun.dev/admin/a"},
		"a token's":          {"spiffe://agentrun.dev/sandbox/a"},
		"another role":       {"spiffe://agentrun.dev/root/a"},
		"climbing":           {"spiffe://agentrun.dev/controller/.."},
		"too long a name":    {"spiffe://agentrun.dev/controller/" + strings.Repeat("a", 254)},
		"opaque":             {"spiffe:agentrun.dev/controller/a"},
	} {
		if c, err := ComponentOf(withURIs(t, uris...)); !sandbox.HasCode(err, CodeUnauthenticated) || c != (Component{}) {
			t.Errorf("%s: %q, %v", name, c, err)
		}
	}
	if s := (Component{}).String(); s != "" {
		t.Errorf("nobody is %q", s)
	}
}

// TestActing: the table of docs/security.md: the principals that each role may name,
// and their rights.
func TestActing(t *testing.T) {
	controller, gateway, node := Component{RoleController, "c"}, Component{RoleGateway, "g"}, Component{RoleNode, "n"}
	for _, c := range []struct {
		by                          Component
		principal, role, namespaces string
		want                        Principal // without a name: itself
	}{
		{controller, "", "", "", Principal{Name: "controller:c", Role: RoleController, Namespaces: []sandbox.Namespace{AllNamespaces}}},
		{gateway, "", "", "", Principal{Name: "gateway:g", Role: RoleGateway, Namespaces: []sandbox.Namespace{AllNamespaces}}},
		{node, "", "", "", Principal{Name: "node:n", Role: RoleNode, Namespaces: []sandbox.Namespace{AllNamespaces}}},
		{controller, "kubernetes:team-a", "", "", Principal{Name: "kubernetes:team-a", Role: RoleUser, Namespaces: []sandbox.Namespace{"team-a"}}},
		{gateway, "kubernetes-user:system:serviceaccount:a:bot", "viewer", "a,b", Principal{Name: "kubernetes-user:system:serviceaccount:a:bot", Role: RoleViewer, Namespaces: []sandbox.Namespace{"a", "b"}}},
		{gateway, "gateway-key:aaaaaaaaaaaa", "admin", "", Principal{Name: "gateway-key:aaaaaaaaaaaa", Role: RoleAdmin, Namespaces: []sandbox.Namespace{AllNamespaces}}},
		{gateway, "gateway-key:aaaaaaaaaaaa", "user", "*", Principal{Name: "gateway-key:aaaaaaaaaaaa", Role: RoleUser, Namespaces: []sandbox.Namespace{AllNamespaces}}},
	} {
		acting, err := ParseActing(c.principal, c.role, c.namespaces)
		if err != nil {
			t.Errorf("%s: %v", c.principal, err)
			continue
		}
		p, err := c.by.Principal(acting)
		if err != nil || p.Name != c.want.Name || p.Role != c.want.Role || !slices.Equal(p.Namespaces, c.want.Namespaces) || p.Via != c.by || p.Sandbox != "" || p.Until != nil {
			t.Errorf("%s for %q: %+v, %v", c.by, c.principal, p, err)
		}
	}
	for _, c := range []struct {
		by                          Component
		principal, role, namespaces string
	}{
		{controller, "gateway-key:aaaaaaaaaaaa", "user", "a"},
		{controller, "kubernetes-user:alice", "user", "a"},
		{gateway, "kubernetes:a", "", ""},
		{node, "kubernetes:a", "", ""},
		{node, "gateway-key:aaaaaaaaaaaa", "user", "a"},
		{node, "kubernetes-user:alice", "viewer", "a"},
		{Component{}, "kubernetes:a", "", ""},
	} {
		acting, err := ParseActing(c.principal, c.role, c.namespaces)
		if err != nil {
			t.Errorf("%s: %v", c.principal, err)
			continue
		}
		if p, err := c.by.Principal(acting); !sandbox.HasCode(err, sandbox.CodeDenied) || p.Name != c.by.String() {
			t.Errorf("%s for %s: %+v, %v", c.by, c.principal, p, err)
		}
	}
	for name, c := range map[string][3]string{
		"root":                      {"uid:0", "", ""},
		"a key of the node":         {"key:aaaaaaaaaaaa", "user", "a"},
		"a token":                   {"sandbox:aaaaaaaaaaaaaaaaaaaa", "user", "a"},
		"a controller":              {"controller:c", "admin", ""},
		"a gateway":                 {"gateway:g", "user", "a"},
		"a node":                    {"node:n", "", ""},
		"no kind":                   {"team-a", "", ""},
		"a kind in capitals":        {"Kubernetes:a", "", ""},
		"a space before":            {" kubernetes:a", "", ""},
		"no namespace":              {"kubernetes:", "", ""},
		"every namespace":           {"kubernetes:*", "", ""},
		"two namespaces":            {"kubernetes:a,b", "", ""},
		"a namespace that climbs":   {"kubernetes:..", "", ""},
		"a namespace with a role":   {"kubernetes:a", "admin", ""},
		"one with others":           {"kubernetes:a", "", "b"},
		"no user":                   {"kubernetes-user:", "user", "a"},
		"a user with a space":       {"kubernetes-user:a b", "user", "a"},
		"a user with a NUL":         {"kubernetes-user:a\x00", "user", "a"},
		"a user with a line":        {"kubernetes-user:a\nb", "user", "a"},
		"a user not of ASCII":       {"kubernetes-user:ä", "user", "a"},
		"a long user":               {"kubernetes-user:" + strings.Repeat("a", 257), "user", "a"},
		"a very long principal":     {"kubernetes-user:" + strings.Repeat("a", 1<<16), "user", "a"},
		"a key that is none":        {"gateway-key:../a", "user", "a"},
		"no role":                   {"gateway-key:aaaaaaaaaaaa", "", "a"},
		"another role":              {"gateway-key:aaaaaaaaaaaa", "root", "a"},
		"the role of a certificate": {"gateway-key:aaaaaaaaaaaa", "controller", "a"},
		"the role of a token":       {"gateway-key:aaaaaaaaaaaa", "sandbox", "a"},
		"no namespaces":             {"gateway-key:aaaaaaaaaaaa", "user", ""},
		"an empty one among them":   {"gateway-key:aaaaaaaaaaaa", "user", "a,,b"},
		"a bad one among them":      {"gateway-key:aaaaaaaaaaaa", "user", "a,B"},
		"an admin of one":           {"gateway-key:aaaaaaaaaaaa", "admin", "a"},
		"too many":                  {"gateway-key:aaaaaaaaaaaa", "user", strings.Repeat("a,", 10000) + "a"},
		"a role for nobody":         {"", "admin", ""},
		"namespaces for nobody":     {"", "", "a"},
	} {
		if a, err := ParseActing(c[0], c[1], c[2]); !sandbox.HasCode(err, sandbox.CodeInvalid) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
}

// TestPrincipalsDiffer: a principal that a component names never has the name of one
// of the node's own principals, nor that of a component.
func TestPrincipalsDiffer(t *testing.T) {
	local := []string{"uid:", "key:", "sandbox:"}
	for _, r := range componentRoles {
		local = append(local, string(r)+":")
	}
	for i, k := range nameables {
		for _, l := range local {
			if strings.HasPrefix(k.prefix, l) || strings.HasPrefix(l, k.prefix) {
				t.Errorf("%s and %s", k.prefix, l)
			}
		}
		for _, other := range nameables[i+1:] {
			if strings.HasPrefix(k.prefix, other.prefix) || strings.HasPrefix(other.prefix, k.prefix) {
				t.Errorf("%s and %s", k.prefix, other.prefix)
			}
		}
		if k.by != RoleController && k.by != RoleGateway {
			t.Errorf("%s is named by %s", k.prefix, k.by)
		}
	}
}

// TestOperationsOfNodes: the operations that other nodes may call are listed
// here, and no more.
func TestOperationsOfNodes(t *testing.T) {
	var open []Operation
	for _, o := range Operations() {
		if o.Rule().For(Component{RoleNode, "n"}) {
			open = append(open, o)
		}
		for _, c := range []Component{{}, {RoleController, "c"}, {RoleGateway, "g"}} {
			if !o.Rule().For(c) {
				t.Errorf("%s is not for %q", o, c)
			}
		}
	}
	if !slices.Equal(open, []Operation{"getHealth", "getSnapshotParts", "readSnapshot"}) {
		t.Errorf("%v", open)
	}
	if Operation("unheardOf").Rule().For(Component{RoleNode, "n"}) {
		t.Error("what is not listed is for nodes")
	}
}

// FuzzActing: the fields of a call are refused, or mean the same when they are written
// and read again.
func FuzzActing(f *testing.F) {
	f.Add("kubernetes:a", "", "")
	f.Add("gateway-key:aaaaaaaaaaaa", "user", "a,b,a")
	f.Add("kubernetes-user:system:serviceaccount:a:b", "admin", "*")
	f.Add("uid:0", "admin", "")
	f.Fuzz(func(t *testing.T, principal, role, namespaces string) {
		a, err := ParseActing(principal, role, namespaces)
		if err != nil || a == nil {
			if a != nil && err != nil && a.Principal == "" {
				t.Errorf("%+v, %v", a, err)
			}
			return
		}
		if a.Principal != principal || len(a.Principal) > maxPrincipal || len(a.Namespaces) == 0 || len(a.Namespaces) > maxNamespaces ||
			!slices.Contains([]Role{RoleAdmin, RoleUser, RoleViewer}, a.Role) {
			t.Errorf("%+v", a)
		}
		again, err := ParseActing(a.Fields())
		if err != nil || again.Principal != a.Principal || again.Role != a.Role || !slices.Equal(again.Namespaces, a.Namespaces) {
			t.Errorf("%+v is %+v, %v", a, again, err)
		}
		for _, l := range []string{"uid:", "key:", "sandbox:", "controller:", "gateway:", "node:"} {
			if strings.HasPrefix(a.Principal, l) {
				t.Errorf("%s is named", a.Principal)
			}
		}
	})
}

// FuzzComponentOf: a URI gives a role only in its one form.
func FuzzComponentOf(f *testing.F) {
	f.Add("spiffe://agentrun.dev/controller/a")
	f.Add("spiffe://agentrun.dev/node/a.b?c#d")
	f.Add("spiffe://u@agentrun.dev:1/gateway/%61")
	f.Fuzz(func(t *testing.T, text string) {
		uri, err := url.Parse(text)
		if err != nil {
			return
		}
		c, err := ComponentOf(&x509.Certificate{URIs: []*url.URL{uri}})
		if err != nil {
			return
		}
		if want := "spiffe://agentrun.dev/" + string(c.Role) + "/" + c.Name; uri.String() != want || !slices.Contains(componentRoles, c.Role) || c.Name == "" || len(c.Name) > 253 {
			t.Errorf("%q is %q", text, c)
		}
	})
}
