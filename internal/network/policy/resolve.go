package policy

import (
	"slices"

	"agentrun.dev/internal/network/addresses"
)

// Tells decides whether DNS may tell a sandbox an address of a name. Each policy by
// itself must allow that. For a closed address this takes a rule by address that
// opens it on some port. If an upstream of internalDomains has given the address, a
// rule about the name is enough. Connect decides later whether the sandbox may
// connect.
func (s Set) Tells(n Name, to addresses.Verdict, internal bool) bool {
	if !to.Closed() {
		return true
	}
	opens := func(r Rule) bool { return to.OpenedBy(r.prefix) }
	for _, p := range s {
		if !slices.ContainsFunc(p.Allow, opens) && !(internal && internalMayOpen(to.Class) && p.speaksOf(n)) {
			return false
		}
	}
	return len(s) > 0
}

// internalMayOpen is true for the classes of addresses that an upstream of
// internalDomains may open.
func internalMayOpen(c addresses.Class) bool {
	return c == addresses.Private || c == addresses.NodeRange
}

// speaksOf says whether a rule, and not the default, decides about a name.
func (p Policy) speaksOf(n Name) bool { return Set{p}.Resolvable(n).Kind != ByDefault }

// LeadsTo decides whether a name that may be resolved may be an alias of another. A
// policy that allows the name only by its default must not deny the other name.
// Otherwise any name could stand in for a denied one.
func (s Set) LeadsTo(n, alias Name) bool {
	for _, p := range s {
		if d := (Set{p}).Resolvable(alias); !p.speaksOf(n) && !d.Allowed && d.Kind != ByDefault {
			return false
		}
	}
	return true
}

// DeniesNames says whether a rule denies a name. Then the names of connections that
// are open by default matter, too.
func (s Set) DeniesNames() bool { return slices.ContainsFunc(s, Policy.deniesNames) }
