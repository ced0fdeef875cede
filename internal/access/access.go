// Package access owns who may do what on a node: API keys with their roles and
// namespaces, the tokens of single sandboxes, and the certificate that clients
// know the node by. Of a key only a digest is kept. docs/security.md has the whole.
package access

import (
	"context"
	"slices"

	"agentrun.dev/internal/sandbox"
)

// Role is what a key is for.
type Role string

// The roles. RoleSandbox is that of a sandbox's token; no key has it.
const (
	RoleAdmin   Role = "admin"
	RoleUser    Role = "user"
	RoleViewer  Role = "viewer"
	RoleSandbox Role = "sandbox"
)

// Permission is what an operation needs.
type Permission int

// The permissions. None is the zero value, so that an operation that was
// forgotten is open to nobody.
const (
	None Permission = iota
	// Anyone is for whoever is known at all.
	Anyone
	// Read looks at objects from the outside.
	Read
	// Use reaches into a sandbox: programs, files, code, ports.
	Use
	// Change makes, changes and ends objects.
	Change
	// Administer is about the node: its keys.
	Administer
)

// grants says what each role may.
var grants = map[Role][]Permission{
	RoleAdmin:   {Anyone, Read, Use, Change, Administer},
	RoleUser:    {Anyone, Read, Use, Change},
	RoleViewer:  {Anyone, Read},
	RoleSandbox: {Anyone, Use},
}

// AllNamespaces in a list of namespaces is every one, also those to come.
const AllNamespaces sandbox.Namespace = "*"

// Principal is who makes a request. The zero value may nothing.
type Principal struct {
	// Name is stable: key:<id>, uid:<n> or sandbox:<id>. What belongs to a
	// principal is kept under it.
	Name       string
	Role       Role
	Namespaces []sandbox.Namespace
	// Sandbox is the only sandbox that a token is for; empty for all others.
	Sandbox sandbox.ID
	// Until ends when the principal may nothing any more; nil is never.
	Until context.Context
}

// May reports whether the principal's role has a permission.
func (p Principal) May(need Permission) bool { return slices.Contains(grants[p.Role], need) }

// In reports whether the principal is for a namespace.
func (p Principal) In(n sandbox.Namespace) bool {
	return slices.Contains(p.Namespaces, n) || slices.Contains(p.Namespaces, AllNamespaces)
}

// Local is the principal of a user of this machine who may use the socket.
func Local(name string) Principal {
	return Principal{Name: name, Role: RoleAdmin, Namespaces: []sandbox.Namespace{AllNamespaces}}
}
