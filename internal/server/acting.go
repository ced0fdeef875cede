package server

import (
	"strings"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
)

// The metadata of a gRPC call by which a component says for whom it makes the call.
const (
	actingPrefix     = "agentrun-"
	actingPrincipal  = actingPrefix + "principal"
	actingRole       = actingPrefix + "role"
	actingNamespaces = actingPrefix + "namespaces"
)

// ActingOf reads it from metadata; nil is nobody else. What would be ignored is refused.
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

// ActingMetadata is what ActingOf reads.
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
