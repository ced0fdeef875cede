package restconv

import (
	"fmt"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// FromNetworkPolicy makes the body of a PUT of a sandbox's network policy.
func FromNetworkPolicy(p policy.Policy) rest.NetworkPolicy { return *fromPolicy(&p) }

// ToNetworkPolicy reads a network policy.
func ToNetworkPolicy(g rest.NetworkPolicy) (policy.Policy, error) {
	p, err := sandbox.ParseNetworkPolicy("", string(g.Egress), g.Allow, g.Deny)
	if err != nil {
		return policy.Policy{}, err
	}
	return *p, nil
}

func fromPolicy(p *policy.Policy) *rest.NetworkPolicy {
	if p == nil {
		return nil
	}
	return &rest.NetworkPolicy{Egress: rest.NetworkPolicyEgress(p.Egress), Allow: policy.Texts(p.Allow), Deny: policy.Texts(p.Deny)}
}

func toPolicy(r *convert.Reader, field string, g *rest.NetworkPolicy) *policy.Policy {
	if g == nil {
		return nil
	}
	return r.Policy(field, string(g.Egress), g.Allow, g.Deny)
}

func fromPolicies(set policy.Set) (out []rest.NetworkPolicy) {
	for _, p := range set {
		out = append(out, FromNetworkPolicy(p))
	}
	return out
}

func toPolicies(r *convert.Reader, given []rest.NetworkPolicy) (out policy.Set) {
	for i, g := range given {
		if p := toPolicy(r, fmt.Sprintf("networkBounds[%d]", i), &g); p != nil {
			out = append(out, *p)
		}
	}
	return out
}

// FromTraffic converts a part of the log of a sandbox's network.
func FromTraffic(p sandbox.TrafficPage) rest.NetworkLog {
	out := rest.NetworkLog{Items: []rest.NetworkLogEntry{}, Next: int64(p.Next), Lost: int64(p.Lost)}
	for _, e := range p.Entries {
		out.Items = append(out.Items, fromEntry(e))
	}
	for _, e := range p.Open {
		out.Open = append(out.Open, fromEntry(e))
	}
	return out
}

// ToTraffic reads a part of the log of a sandbox's network.
func ToTraffic(g rest.NetworkLog) (sandbox.TrafficPage, error) {
	var r convert.Reader
	out := sandbox.TrafficPage{Next: r.Size("next", g.Next), Lost: r.Size("lost", g.Lost)}
	for _, e := range g.Items {
		out.Entries = append(out.Entries, toEntry(&r, e))
	}
	for _, e := range g.Open {
		out.Open = append(out.Open, toEntry(&r, e))
	}
	return out, r.Err()
}

func fromEntry(e sandbox.Traffic) rest.NetworkLogEntry {
	return rest.NetworkLogEntry{
		Seq: int64(e.Seq), Time: e.Time, Ended: FromTime(e.Ended), Protocol: e.Protocol, Name: e.Name,
		Address: convert.FromAddress(e.Address), Remote: convert.FromAddress(e.Remote), Sent: int64(e.Sent), Received: int64(e.Received),
		Rule: e.Rule, Kind: e.Kind, Reason: e.Reason, Outcome: e.Outcome, Repeated: int64(e.Repeated),
	}
}

func toEntry(r *convert.Reader, g rest.NetworkLogEntry) sandbox.Traffic {
	return sandbox.Traffic{
		Seq: r.Size("seq", g.Seq), Time: g.Time, Ended: ToTime(g.Ended), Protocol: g.Protocol, Name: g.Name,
		Address: r.Address("address", g.Address), Remote: r.Address("remote", g.Remote), Sent: r.Size("sent", g.Sent), Received: r.Size("received", g.Received),
		Rule: g.Rule, Kind: g.Kind, Reason: g.Reason, Outcome: g.Outcome, Repeated: r.Size("repeated", g.Repeated),
	}
}
