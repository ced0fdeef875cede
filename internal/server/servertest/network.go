package servertest

import (
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// policy parses a policy.
func (s *suite) policy(egress string, allow ...string) *policy.Policy {
	s.Helper()
	p, err := policy.Parse(egress, allow, nil)
	s.must(err)
	return &p
}

// network: policies are set within bounds, and shown; logs are read.
func (s *suite) network() {
	bound := s.policy("deny", "*.example.org:443", "10.1.0.0/16:5432")
	s.Template.NetworkPolicy = bound
	s.setUp()
	shows := func(what string, got sandbox.Sandbox, err error, own *policy.Policy, bounds ...*policy.Policy) {
		s.Helper()
		s.must(err)
		if (got.Egress.Own == nil) != (own == nil) || own != nil && !got.Egress.Own.Equal(*own) || len(got.Egress.Bounds) != len(bounds) {
			s.Errorf("%s: %+v", what, got.Egress)
			return
		}
		for i, b := range bounds {
			if !got.Egress.Bounds[i].Equal(*b) {
				s.Errorf("%s: bound %d is %+v", what, i, got.Egress.Bounds[i])
			}
		}
	}
	claimed := s.policy("deny", "a.example.org:443")
	made, _, err := s.Service.Claim(s.ctx, sandbox.ClaimRequest{Key: s.key("a"), Spec: sandbox.ClaimSpec{Pool: "pool", NetworkPolicy: claimed}})
	shows("a claim", made, err, claimed, bound)
	set := s.policy("allow")
	made, err = s.Service.SetNetworkPolicy(s.ctx, s.key("a"), set)
	shows("set", made, err, set, bound)
	got, err := s.Service.Sandbox(s.ctx, s.key("a"))
	shows("looked at", got, err, set, bound)

	narrow := s.policy("deny", "b.example.org:443")
	_, _, err = s.Service.Fork(s.ctx, sandbox.ForkRequest{Key: s.key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1, NetworkPolicy: narrow}})
	s.must(err)
	got, err = s.Service.Sandbox(s.ctx, s.key("f-1"))
	shows("a fork", got, err, narrow, bound, set)

	_, err = s.Service.Hibernate(s.ctx, s.key("a"))
	s.must(err)
	got, err = s.Service.SetNetworkPolicy(s.ctx, s.key("a"), nil)
	shows("removed", got, err, nil, bound)
	s.state(got, err, sandbox.Hibernated)
	_, err = s.Service.SetNetworkPolicy(s.ctx, s.key("nobody"), set)
	s.missing("a policy of nobody", err)
	s.traffic()
}

// traffic: a hibernated sandbox has no log, and requests for logs have bounds.
func (s *suite) traffic() {
	page, err := s.Service.Traffic(s.ctx, sandbox.TrafficRequest{Key: s.key("a"), Open: true})
	s.must(err)
	if len(page.Entries)+len(page.Open) != 0 || page.Next != 1 || page.Lost != 0 {
		s.Errorf("%+v", page)
	}
	for what, r := range map[string]sandbox.TrafficRequest{
		"a page too large":      {Max: sandbox.MaxTraffic + 1},
		"a negative page":       {Max: -1},
		"a wait too long":       {Wait: sandbox.MaxTrafficWait + time.Second},
		"a wait that is no one": {Wait: -time.Second},
	} {
		r.Key = s.key("a")
		_, err := s.Service.Traffic(s.ctx, r)
		s.refused(what, err, sandbox.CodeInvalid)
	}
	_, err = s.Service.Traffic(s.ctx, sandbox.TrafficRequest{Key: s.key("nobody")})
	s.missing("the log of nobody", err)
}
