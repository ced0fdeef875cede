package network

import (
	"slices"
	"strings"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
)

// entry waits for a matching entry in the log of a sandbox's network.
func (s *site) entry(t *testing.T, sandbox string, matches func(rest.NetworkLogEntry) bool) rest.NetworkLogEntry {
	t.Helper()
	from := int64(1)
	for {
		page, err := s.client.NetworkLog(t.Context(), sandbox, client.NetworkLogRequest{From: from, Wait: patience / 10})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page.Items {
			if matches(e) {
				return e
			}
		}
		if len(page.Items) == 0 {
			t.Fatalf("the network log of %s has no such entry", sandbox)
		}
		from = page.Next
	}
}

// received waits until that many bytes have arrived on an open connection of a
// sandbox.
func (s *site) received(t *testing.T, sandbox, name string, bytes int64) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		page, err := s.client.NetworkLog(t.Context(), sandbox, client.NetworkLogRequest{Open: true})
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(page.Open, func(e rest.NetworkLogEntry) bool { return e.Name == name && e.Received == bytes }) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("open connections: %+v; want one to %s that has got %d bytes", page.Open, name, bytes)
		}
	}
}

// TestChange: the network policy of a running sandbox changes, within its bounds.
func TestChange(t *testing.T) {
	s := newSite(t)
	s.importImage(t, "demo:1", "python.sh")
	s.Name("source.example.org", 60, "25.1.113.60")
	s.Name("www.example.org", 60, "25.1.113.61")
	s.Name("more.example.org", 60, "25.1.113.61")
	s.ServeHTTP(t, "25.1.113.61:80", hello)
	src := s.newSource(t, "25.1.113.60:9001", 1<<20)
	s.pool(t, "demo", 1, "networkPolicy: {egress: deny, allow: [source.example.org, www.example.org]}")
	s.claim(t, "demo", "a")
	reaches := func(t *testing.T, sandbox, name string, want bool) {
		t.Helper()
		text := "hello from"
		if !want {
			text = "failed:"
		}
		s.prints(t, sandbox, text, "python3", "-c", get, "http://"+name+"/")
	}

	t.Run("revocation cuts live connections", func(t *testing.T) {
		s.reads(t, "a", src, "9001", "8001")
		s.received(t, "a", "source.example.org", int64(len(src.bytes)/2))
		reaches(t, "a", "www.example.org", true)
		s.must(t, "network", "set", "a", "--allow", "www.example.org")
		if how, _ := s.outcome(t, "a", "8001"); how != "ECONNRESET" {
			t.Errorf("a live connection to a revoked name: %s; want ECONNRESET", how)
		}
		e := s.entry(t, "a", func(e rest.NetworkLogEntry) bool { return e.Outcome == "cut" })
		if e.Name != "source.example.org" || e.Received != int64(len(src.bytes)/2) || e.Reason == "" {
			t.Errorf("the log of the connection: %+v", e)
		}
		reaches(t, "a", "www.example.org", true)
	})
	t.Run("a sandbox's own policy stays within the template's", func(t *testing.T) {
		if _, err := s.client.SetNetworkPolicy(t.Context(), "a", rest.NetworkPolicy{Egress: rest.NetworkPolicyEgressAllow}); err != nil {
			t.Fatal(err)
		}
		reaches(t, "a", "www.example.org", true)
		reaches(t, "a", "more.example.org", false)
		if _, err := s.client.DeleteNetworkPolicy(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a fork can only narrow", func(t *testing.T) {
		s.fork(t, "a", "wide", 1, &rest.NetworkPolicy{Egress: rest.NetworkPolicyEgressAllow, Allow: rest.NetworkRules{"more.example.org"}})
		reaches(t, "wide-1", "www.example.org", true)
		reaches(t, "wide-1", "more.example.org", false)
		s.fork(t, "a", "narrow", 1, &rest.NetworkPolicy{Allow: rest.NetworkRules{"source.example.org"}})
		reaches(t, "narrow-1", "www.example.org", false)
		// The bounds of a source also bound its children, even if they request
		// more.
		s.fork(t, "narrow-1", "again", 1, nil)
		reaches(t, "again-1", "www.example.org", false)
		if _, err := s.client.SetNetworkPolicy(t.Context(), "again-1", rest.NetworkPolicy{Egress: rest.NetworkPolicyEgressAllow, Allow: rest.NetworkRules{"www.example.org"}}); err != nil {
			t.Fatal(err)
		}
		reaches(t, "again-1", "www.example.org", false)
		if _, err := s.client.DeleteNetworkPolicy(t.Context(), "again-1"); err != nil {
			t.Fatal(err)
		}
		reaches(t, "again-1", "www.example.org", false)
	})
	t.Run("a claim can only narrow", func(t *testing.T) {
		s.claim(t, "demo", "claimed", "networkPolicy: {egress: allow, deny: [www.example.org]}")
		reaches(t, "claimed", "www.example.org", false)
		reaches(t, "claimed", "more.example.org", false)
	})
	t.Run("a template's change holds for later claims", func(t *testing.T) {
		s.pool(t, "demo", 1, "networkPolicy: {egress: deny, allow: [more.example.org]}")
		s.claim(t, "demo", "later")
		reaches(t, "later", "more.example.org", true)
		reaches(t, "later", "www.example.org", false)
		reaches(t, "a", "www.example.org", true)
		if log := s.buildLogs(t); strings.Count(log, "boot sha256") > 1 {
			t.Errorf("a template whose policy alone has changed was built again:\n%s", log)
		}
	})
	t.Run("no interface", func(t *testing.T) {
		s.pool(t, "none", 1, "network: none")
		s.claim(t, "none", "alone")
		reaches(t, "alone", "www.example.org", false)
		s.prints(t, "alone", "['lo']", "python3", "-c", "import socket; print([name for _, name in socket.if_nameindex()])")
		if _, err := s.client.SetNetworkPolicy(t.Context(), "alone", rest.NetworkPolicy{Allow: rest.NetworkRules{"www.example.org"}}); err == nil {
			t.Error("a sandbox without an interface has got a policy that lets it out")
		}
	})
}
