package server

import (
	"strings"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
)

// The metadata of a gRPC call by which a component names the principal that it acts
// for.
const (
	actingPrefix     = "agentrun-"
	actingPrincipal  = actingPrefix + "principal"
	actingRole       = actingPrefix + "role"
	actingNamespaces = actingPrefix + "namespaces"
)

// ActingOf reads the principal that a component names in metadata. It returns nil if the
// component acts for itself. Unknown and repeated fields are errors, because otherwise
// they would be ignored.
func ActingOf(metadata map[string][]string) (*access.Acting, error) {
	fields := map[string]string{actingPrincipal: "", actingRole: "", actingNamespaces: ""}
	for key, values := range metadata {
		if !strings.HasPrefix(key, actingPrefix) {
			continue
		}
		_, known := fields[key]
		switch {
		case !known:
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the metadata %s is not known", sandbox.Quote(key)).
				Try("Use %s, %s and %s", actingPrincipal, actingRole, actingNamespaces)
		case len(values) != 1 || values[0] == "":
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the metadata %s must be there once, with a value, or not at all", key)
		}
		fields[key] = values[0]
	}
	return access.ParseActing(fields[actingPrincipal], fields[actingRole], fields[actingNamespaces])
}

// ActingMetadata returns the metadata from which ActingOf reads a.
func ActingMetadata(a access.Acting) map[string]string {
	out := map[string]string{}
	principal, role, namespaces := a.Fields()
	for key, value := range map[string]string{actingPrincipal: principal, actingRole: role, actingNamespaces: namespaces} {
		if value != "" {
			out[key] = value
		}
	}
	return out
}
