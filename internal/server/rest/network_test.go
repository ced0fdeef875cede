package rest

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/sandbox"
)

// withNetwork makes a pool whose sandboxes may reach something.
func (n *testNode) withNetwork() {
	n.t.Helper()
	n.do("PUT", v1+"/templates/python", rest.TemplateSpec{
		Image: "python", NetworkPolicy: &rest.NetworkPolicy{Egress: rest.NetworkPolicyEgressDeny, Allow: []string{"*.example.org:443"}},
	}).ok(200)
	n.do("PUT", v1+"/pools/pool", rest.PoolSpec{Template: "python", Replicas: 1}).ok(200)
	n.Eventually(func() bool { return as[rest.Pool](n.do("GET", v1+"/pools/pool", nil).ok(200)).Ready == 1 })
}

// machine is the name of a sandbox's interface.
func (n *testNode) machine(name sandbox.Name) sandbox.ID {
	n.t.Helper()
	s, err := n.Manager.Sandbox(n.t.Context(), sandbox.Key{Namespace: "default", Name: name})
	if err != nil {
		n.t.Fatal(err)
	}
	return s.Machine
}

// TestNetworkPolicy: it is shown with its bounds, replaced, and removed.
func TestNetworkPolicy(t *testing.T) {
	n := newNode(t)
	n.withNetwork()
	path := n.claim("a")
	s := as[rest.Sandbox](n.do("GET", path, nil).ok(200))
	if s.NetworkPolicy != nil || len(s.NetworkBounds) != 1 || !slices.Equal(s.NetworkBounds[0].Allow, []string{"*.example.org:443"}) {
		t.Errorf("%+v within %+v", s.NetworkPolicy, s.NetworkBounds)
	}
	s = as[rest.Sandbox](n.do("PUT", path+"/network/policy", rest.NetworkPolicy{Allow: []string{"A.Example.org:443"}, Deny: []string{"evil.example.com"}}).ok(200))
	if p := s.NetworkPolicy; p == nil || p.Egress != rest.NetworkPolicyEgressDeny || !slices.Equal(p.Allow, []string{"a.example.org:443"}) || !slices.Equal(p.Deny, []string{"evil.example.com"}) {
		t.Errorf("%+v", p)
	}
	if set := n.Network.Policies(n.machine("a")); len(set) != 2 {
		t.Errorf("the network has %+v", set)
	}
	n.do("PUT", path+"/network/policy", `{"egress":"some"}`).refused(400, "invalid")
	n.do("PUT", path+"/network/policy", `{"allow":["*"]}`).refused(400, "invalid")
	n.do("PUT", path+"/network/policy", `null`).refused(400, "invalid")
	n.do("PUT", v1+"/sandboxes/nobody/network/policy", `{}`).refused(404, "not_found")
	if s = as[rest.Sandbox](n.do("DELETE", path+"/network/policy", nil).ok(200)); s.NetworkPolicy != nil || len(s.NetworkBounds) != 1 {
		t.Errorf("%+v within %+v", s.NetworkPolicy, s.NetworkBounds)
	}
	// With a template that allows nothing, a sandbox cannot ask for access.
	n.do("PUT", v1+"/templates/python", rest.TemplateSpec{Image: "python"}).ok(200)
	closed := as[rest.Sandbox](n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}).ok(201))
	n.do("PUT", v1+"/sandboxes/"+closed.Name+"/network/policy", `{"egress":"allow"}`).refused(400, "invalid")
	n.do("PUT", v1+"/sandboxes/"+closed.Name+"/network/policy", `{}`).ok(200)
	kept := slices.ContainsFunc(n.Events(), func(e audit.Event) bool {
		return e.Verb == "putNetworkPolicy" && e.Object == "sandboxes/a"
	})
	if !kept {
		t.Error("the audit log has no change of the policy")
	}
}

// TestNetworkLog: entries have numbers, a page ends where it is told to, and a request
// that waits is answered by the next entry.
func TestNetworkLog(t *testing.T) {
	n := newNode(t)
	n.withNetwork()
	path := n.claim("a") + "/network/log"
	machine := n.machine("a")
	at := time.Date(2026, 11, 16, 20, 0, 0, 0, time.UTC)
	n.Network.Log(machine, sandbox.Traffic{
		Time: at, Ended: at.Add(time.Second), Protocol: "tcp", Name: "a.example.org", Address: netip.MustParseAddrPort("192.0.2.1:443"),
		Sent: 10, Received: 20, Rule: "*.example.org:443", Kind: "wildcard", Outcome: "closed",
	})
	n.Network.Log(machine, sandbox.Traffic{Time: at, Ended: at, Protocol: "dns", Name: "evil.example", Rule: "egress: deny", Kind: "default", Reason: "no rule", Outcome: "refused", Repeated: 3})
	n.Network.Log(machine, sandbox.Traffic{Time: at, Protocol: "tcp", Address: netip.MustParseAddrPort("[2001:db8::1]:443"), Outcome: "open"})
	l := as[rest.NetworkLog](n.do("GET", path+"?limit=1", nil).ok(200))
	if len(l.Items) != 1 || l.Next != 2 || l.Open != nil || l.Items[0].Seq != 1 || l.Items[0].Address != "192.0.2.1:443" || l.Items[0].Received != 20 || !l.Items[0].Time.Equal(at) {
		t.Errorf("%+v", l)
	}
	mine := n.with(n.token("a")) // a sandbox may see what it did
	l = as[rest.NetworkLog](mine.do("GET", path+"?from=2&open=true", nil).ok(200))
	if len(l.Items) != 1 || l.Next != 3 || l.Items[0].Name != "evil.example" || l.Items[0].Address != "" || l.Items[0].Repeated != 3 || len(l.Open) != 1 || l.Open[0].Ended != nil {
		t.Errorf("%+v", l)
	}
	mine.do("PUT", v1+"/sandboxes/a/network/policy", `{}`).refused(403, "permission_denied")
	if l = as[rest.NetworkLog](n.do("GET", path+"?from=3", nil).ok(200)); l.Items == nil || len(l.Items) != 0 || l.Next != 3 {
		t.Errorf("%+v", l)
	}
	n.with(n.key(access.RoleViewer, "default")).do("GET", path, nil).ok(200)
	answers := make(chan *response, 1)
	go func() { answers <- n.do("GET", path+"?from=3&wait=30s", nil) }()
	n.Network.Log(machine, sandbox.Traffic{Time: at, Protocol: "udp", Outcome: "failed"})
	if l = as[rest.NetworkLog]((<-answers).ok(200)); len(l.Items) != 1 || l.Items[0].Protocol != "udp" {
		t.Errorf("%+v", l)
	}
	for _, query := range []string{"from=0", "from=-1", "from=x", "limit=0", "limit=1001", "wait=31s", "wait=-1s", "wait=1", "open=perhaps", "follow=true"} {
		n.do("GET", path+"?"+query, nil).refused(400, "invalid")
	}
	n.do("POST", v1+"/sandboxes/a/hibernate", nil).ok(200)
	if l = as[rest.NetworkLog](n.do("GET", path+"?wait=1ms", nil).ok(200)); len(l.Items) != 0 {
		t.Errorf("%+v", l)
	}
}
