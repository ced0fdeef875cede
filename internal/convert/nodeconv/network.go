package nodeconv

import (
	"fmt"

	"google.golang.org/protobuf/types/known/durationpb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// FromOwnPolicy makes the request of SetNetworkPolicy. The caller adds
// namespace and name.
func FromOwnPolicy(p *policy.Policy) *nodev1.SetNetworkPolicyRequest {
	return &nodev1.SetNetworkPolicyRequest{Policy: fromPolicy(p)}
}

// ToOwnPolicy reads the network policy of a sandbox; nil if it is missing.
func ToOwnPolicy(g *nodev1.SetNetworkPolicyRequest) (*policy.Policy, error) {
	var r convert.Reader
	return toPolicy(&r, "policy", g.GetPolicy()), r.Err()
}

func fromPolicy(p *policy.Policy) *nodev1.NetworkPolicy {
	if p == nil {
		return nil
	}
	return &nodev1.NetworkPolicy{Egress: string(p.Egress), Allow: policy.Texts(p.Allow), Deny: policy.Texts(p.Deny)}
}

func toPolicy(r *convert.Reader, field string, g *nodev1.NetworkPolicy) *policy.Policy {
	if g == nil {
		return nil
	}
	return r.Policy(field, g.GetEgress(), g.GetAllow(), g.GetDeny())
}

func fromPolicies(set policy.Set) (out []*nodev1.NetworkPolicy) {
	for _, p := range set {
		out = append(out, fromPolicy(&p))
	}
	return out
}

func toPolicies(r *convert.Reader, given []*nodev1.NetworkPolicy) (out policy.Set) {
	for i, g := range given {
		if p := toPolicy(r, fmt.Sprintf("network_bounds[%d]", i), g); p != nil {
			out = append(out, *p)
		}
	}
	return out
}

// FromTrafficRequest makes the request of GetNetworkLog.
func FromTrafficRequest(r sandbox.TrafficRequest) *nodev1.GetNetworkLogRequest {
	return &nodev1.GetNetworkLogRequest{
		Namespace: string(r.Namespace), Name: string(r.Name), From: r.From, Limit: uint32(r.Max), Wait: durationpb.New(r.Wait), Open: r.Open,
	}
}

// ToTrafficRequest reads which part of a log is requested. Without a limit the
// default applies.
func ToTrafficRequest(g *nodev1.GetNetworkLogRequest) (sandbox.TrafficRequest, error) {
	var r convert.Reader
	out := sandbox.TrafficRequest{
		Key: r.Key(g.GetNamespace(), g.GetName()), From: g.GetFrom(), Max: int(g.GetLimit()),
		Wait: r.Duration(ToDuration("wait", g.GetWait())), Open: g.GetOpen(),
	}
	return out, r.Err()
}

// FromTraffic converts a part of the log of a sandbox's network.
func FromTraffic(p sandbox.TrafficPage) *nodev1.NetworkLog {
	out := &nodev1.NetworkLog{Next: p.Next, Lost: p.Lost}
	for _, e := range p.Entries {
		out.Entries = append(out.Entries, fromEntry(e))
	}
	for _, e := range p.Open {
		out.Open = append(out.Open, fromEntry(e))
	}
	return out
}

// ToTraffic reads a part of the log of a sandbox's network.
func ToTraffic(g *nodev1.NetworkLog) (sandbox.TrafficPage, error) {
	var r convert.Reader
	out := sandbox.TrafficPage{Next: g.GetNext(), Lost: g.GetLost()}
	for _, e := range g.GetEntries() {
		out.Entries = append(out.Entries, toEntry(&r, e))
	}
	for _, e := range g.GetOpen() {
		out.Open = append(out.Open, toEntry(&r, e))
	}
	return out, r.Err()
}

func fromEntry(e sandbox.Traffic) *nodev1.NetworkLogEntry {
	return &nodev1.NetworkLogEntry{
		Seq: e.Seq, Time: fromTime(e.Time), Ended: fromTime(e.Ended), Protocol: e.Protocol, Name: e.Name,
		Address: convert.FromAddress(e.Address), Remote: convert.FromAddress(e.Remote), Sent: e.Sent, Received: e.Received,
		Rule: e.Rule, Kind: e.Kind, Reason: e.Reason, Outcome: e.Outcome, Repeated: e.Repeated,
	}
}

func toEntry(r *convert.Reader, g *nodev1.NetworkLogEntry) sandbox.Traffic {
	return sandbox.Traffic{
		Seq: g.GetSeq(), Time: toTime(g.GetTime()), Ended: toTime(g.GetEnded()), Protocol: g.GetProtocol(), Name: g.GetName(),
		Address: r.Address("address", g.GetAddress()), Remote: r.Address("remote", g.GetRemote()), Sent: g.GetSent(), Received: g.GetReceived(),
		Rule: g.GetRule(), Kind: g.GetKind(), Reason: g.GetReason(), Outcome: g.GetOutcome(), Repeated: g.GetRepeated(),
	}
}
