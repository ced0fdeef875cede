package server

import (
	"context"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
)

type principalKey struct{}

// WithPrincipal returns the context of a principal's request. It ends when the key
// or token of the request does. The caller cancels it when the request is over.
func WithPrincipal(ctx context.Context, p access.Principal) (context.Context, context.CancelFunc) {
	ctx = sandbox.WithPrincipal(ctx, sandbox.Principal(p.Name))
	if p.Owns() {
		ctx = sandbox.WithOwning(ctx)
	}
	if p.May(access.Administer) {
		ctx = sandbox.WithAdministering(ctx)
	}
	ctx, cancel := context.WithCancel(context.WithValue(ctx, principalKey{}, p))
	if p.Until == nil {
		return ctx, cancel
	}
	stop := context.AfterFunc(p.Until, cancel)
	return ctx, func() { stop(); cancel() }
}

// PrincipalOf returns the principal that makes a request.
func PrincipalOf(ctx context.Context) access.Principal {
	p, _ := ctx.Value(principalKey{}).(access.Principal)
	return p
}

// Target is the target of a request, as the request names it. No field is
// checked.
type Target struct {
	Operation access.Operation
	// Kind, Namespace and Name are those of the object. Without a kind the target
	// is the namespace; without a namespace it is the node.
	Kind            sandbox.Kind
	Namespace, Name string
}

// Authorise refuses an operation that a principal may not do with the request's
// target. It is the one place where that is decided, for all APIs.
func (c *Config) Authorise(ctx context.Context, p access.Principal, t Target) error {
	rule := t.Operation.Rule()
	if !rule.For(p.Via) {
		return NotForRole(t.Operation, p.Via.Role)
	}
	if !p.May(rule.Need) && (!rule.Own || p.Sandbox == "") {
		return NotForRole(t.Operation, p.Role)
	}
	if t.Namespace == "" {
		return nil
	}
	n, err := sandbox.ParseNamespace(t.Namespace)
	if err != nil {
		return err
	}
	if t.Kind == "" {
		if p.In(n) && p.Sandbox == "" {
			return nil
		}
		return deniedIn(n)
	}
	k, err := sandbox.ParseKey(t.Namespace, t.Name)
	if err != nil {
		return err
	}
	switch {
	case p.Sandbox != "":
		if s, err := c.Service.Sandbox(ctx, k); err != nil || t.Kind != sandbox.KindSandbox || s.ID != p.Sandbox {
			return sandbox.NotFound(t.Kind, k)
		}
		return nil
	case p.In(n):
		return nil
	case rule.Makes:
		return deniedIn(n)
	}
	return sandbox.NotFound(t.Kind, k)
}

// MayPublish refuses to publish or unpublish an image if the principal is not for
// all namespaces: publishing gives an image to all namespaces, and finds it without
// a namespace.
func MayPublish(ctx context.Context) error {
	p := PrincipalOf(ctx)
	if p.In(access.AllNamespaces) {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeDenied, "published images are those of all namespaces, and not all are yours").Try("Use a key that is for all namespaces (*)")
}

// NotForRole is the error for an operation that a role may not call.
func NotForRole(o access.Operation, r access.Role) error {
	e := sandbox.Errorf(sandbox.CodeDenied, "%s is not for the role %s", o, r)
	switch r {
	case access.RoleController, access.RoleGateway:
		return e.Try("Name the principal that the call is for; docs/security.md has the table")
	case access.RoleNode:
		return e.Try("Use the certificate of a controller or a gateway; docs/security.md has the table")
	}
	return e.Try("Use a key with more rights; docs/security.md has the table")
}

// deniedIn reveals neither the objects of a namespace nor whether the namespace
// is in use.
func deniedIn(n sandbox.Namespace) error {
	return sandbox.Errorf(sandbox.CodeDenied, "namespace %s is not one of yours", n).Try("Use a key of that namespace")
}

// PeerUID returns the user id of the process at the other end of a Unix socket.
func PeerUID(conn net.Conn) (uint32, error) {
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("%T is no Unix socket", conn)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	var peerErr error
	err = raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(err, peerErr); err != nil {
		return 0, err
	}
	return peer.Uid, nil
}
