package policy

import (
	"slices"

	"agentrun.dev/internal/network/addresses"
)

// Opens decides whether rules by address open a closed address on some port, so that a sandbox
// may be told it by DNS. Whether it may connect is Connect's to decide.
func (s Set) Opens(to addresses.Verdict) bool {
	opens := func(r Rule) bool { return to.OpenedBy(r.prefix) }
	for _, p := range s {
		if !slices.ContainsFunc(p.Allow, opens) {
			return false
		}
	}
	return len(s) > 0
}

// DeniesNames says whether a rule denies a name, so that the names of connections matter that
// are open by default.
func (s Set) DeniesNames() bool { return slices.ContainsFunc(s, Policy.deniesNames) }
