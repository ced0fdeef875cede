package sandbox

import (
	"agentrun.dev/internal/network/policy"
)

// NetworkMode says whether a template's sandboxes have a network interface. If it
// is empty, they have one. Forks cannot gain one: it is part of the snapshot.
type NetworkMode string

// NetworkNone is the mode of sandboxes without an interface.
const NetworkNone NetworkMode = "none"

// ParseNetworkPolicy reads the policy of a field. field is empty for a policy that is
// not part of another object.
func ParseNetworkPolicy(field, egress string, allow, deny []string) (*policy.Policy, error) {
	p, err := policy.Parse(egress, allow, deny)
	if err != nil && field == "" {
		return nil, Errorf(CodeInvalid, "%v", err)
	}
	if err != nil {
		return nil, Errorf(CodeInvalid, "%s.%v", field, err)
	}
	return &p, nil
}

// validateNetwork refuses a network that no template can have.
func (s TemplateSpec) validateNetwork() error {
	switch s.Network {
	case "":
	case NetworkNone:
		if s.TrustNamespaceCA {
			return Invalid("trustNamespaceCA", "with network: none there are no requests to put values into: leave it out")
		}
		if s.NetworkPolicy != nil || s.BuildNetwork != nil {
			return Invalid("network", "with none there is no way out that networkPolicy or buildNetwork could be about: leave them out")
		}
	default:
		return Invalid("network", "%s is not possible: it is none, or left out", Quote(string(s.Network)))
	}
	if err := validatePolicy("networkPolicy", s.NetworkPolicy); err != nil {
		return err
	}
	return validatePolicy("buildNetwork", s.BuildNetwork)
}

// validatePolicy refuses a policy that policy.Parse would not have made.
func validatePolicy(field string, p *policy.Policy) error {
	if p == nil {
		return nil
	}
	if err := p.Validate(); err != nil {
		return Errorf(CodeInvalid, "%s.%v", field, err)
	}
	return nil
}
