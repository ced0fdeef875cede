// Package access owns who may do what on a node: API keys with their roles and
// namespaces, the tokens of single sandboxes, the certificate that clients know the
// node by, and the certificates that controllers, gateways and other nodes are known by.
// Of a key only a digest is kept. docs/security.md has the whole.
package access

import (
	"context"
	"slices"

	"agentrun.dev/internal/sandbox"
)

// Role is what a key or a certificate is for.
type Role string

// The roles. RoleSandbox is that of a sandbox's token, and the last three are those of
// certificates; no key has them.
const (
	RoleAdmin      Role = "admin"
	RoleUser       Role = "user"
	RoleViewer     Role = "viewer"
	RoleSandbox    Role = "sandbox"
	RoleController Role = "controller"
	RoleGateway    Role = "gateway"
	RoleNode       Role = "node"
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
	// Observe looks at the node as a whole.
	Observe
	// Administer is about the node: its keys.
	Administer
	// Replicate reads snapshots of templates, of all namespaces, to have them on another
	// node.
	Replicate
)

// grants says what each role may. Those of certificates are for a component that acts
// itself: what is made, changed or used belongs to somebody, whom it has to name.
var grants = map[Role][]Permission{
	RoleAdmin:      {Anyone, Read, Use, Change, Observe, Administer},
	RoleUser:       {Anyone, Read, Use, Change},
	RoleViewer:     {Anyone, Read},
	RoleSandbox:    {Anyone, Use},
	RoleController: {Anyone, Read, Observe, Administer},
	RoleGateway:    {Anyone, Read, Observe},
	RoleNode:       {Anyone, Replicate},
}

// AllNamespaces in a list of namespaces is every one, also those to come.
const AllNamespaces sandbox.Namespace = "*"

// Principal is who makes a request. The zero value may nothing.
type Principal struct {
	// Name is stable: key:<id>, uid:<n>, sandbox:<id>, that of a component, or one that
	// a component has named. What belongs to a principal is kept under it.
	Name       string
	Role       Role
	Namespaces []sandbox.Namespace
	// Sandbox is the only sandbox that a token is for; empty for all others.
	Sandbox sandbox.ID
	// Via is the component that makes the request; zero for all others.
	Via Component
	// Local says that it is a user of this machine, over a socket.
	Local bool
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
	return Principal{Name: name, Role: RoleAdmin, Namespaces: []sandbox.Namespace{AllNamespaces}, Local: true}
}

// Owns reports whether the principal may give owners, and change what has one. A key of the
// node may not, whatever its role is.
func (p Principal) Owns() bool { return p.Local || p.Via.Role == RoleController }
