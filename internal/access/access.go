// Package access owns the rights to use a node: API keys with their roles and
// namespaces, the tokens of single sandboxes, the certificate that clients know the node
// by, and the certificates that controllers, gateways and other nodes are known by. Of a
// key only a digest is stored. docs/security.md describes all of it.
package access

import (
	"context"
	"slices"

	"agentrun.dev/internal/sandbox"
)

// Role is the role of a key or a certificate.
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

// Permission is a right that an operation needs.
type Permission int

// The permissions. None is the zero value and no role has it, so that a
// forgotten operation is closed to all.
const (
	None Permission = iota
	// Anyone is a right of every known principal.
	Anyone
	// Read is to look at objects from the outside.
	Read
	// Use is to reach into a sandbox: programs, files, code, ports.
	Use
	// Change is to make, change and end objects.
	Change
	// Observe is to look at the node as a whole.
	Observe
	// Administer is for the node itself: its keys.
	Administer
	// Replicate is to read snapshots of templates, of all namespaces, in order to copy
	// them to another node.
	Replicate
)

// grants has the permissions of each role. Those of certificates are for a component
// that acts for itself. They have neither Use nor Change: objects are made, changed
// and used for a principal, which the component has to name.
var grants = map[Role][]Permission{
	RoleAdmin:      {Anyone, Read, Use, Change, Observe, Administer},
	RoleUser:       {Anyone, Read, Use, Change},
	RoleViewer:     {Anyone, Read},
	RoleSandbox:    {Anyone, Use},
	RoleController: {Anyone, Read, Observe, Administer},
	RoleGateway:    {Anyone, Read, Observe},
	RoleNode:       {Anyone, Replicate},
}

// AllNamespaces in a list of namespaces stands for every namespace, future ones
// included.
const AllNamespaces sandbox.Namespace = "*"

// Principal makes requests. The zero value has no rights.
type Principal struct {
	// Name is stable: key:<id>, uid:<n>, sandbox:<id>, that of a component, or one that
	// a component has named. The principal's belongings are stored under it.
	Name       string
	Role       Role
	Namespaces []sandbox.Namespace
	// Sandbox is the only sandbox that a token is for; empty for all other
	// principals.
	Sandbox sandbox.ID
	// Via is the component that makes the request; zero for all other
	// principals.
	Via Component
	// Local says that the principal is a user of this machine, over a socket.
	Local bool
	// Until ends when the principal loses its rights; nil means never.
	Until context.Context
}

// May reports whether the principal's role has a permission.
func (p Principal) May(need Permission) bool { return slices.Contains(grants[p.Role], need) }

// In reports whether the principal is for a namespace.
func (p Principal) In(n sandbox.Namespace) bool {
	return slices.Contains(p.Namespaces, n) || slices.Contains(p.Namespaces, AllNamespaces)
}

// Local returns the principal of a user of this machine who may use the socket.
func Local(name string) Principal {
	return Principal{Name: name, Role: RoleAdmin, Namespaces: []sandbox.Namespace{AllNamespaces}, Local: true}
}

// Owns reports whether the principal may give objects owners, and change objects that have
// one. A key of the node may not, whatever its role is.
func (p Principal) Owns() bool { return p.Local || p.Via.Role == RoleController }
