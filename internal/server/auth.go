package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
)

// Codes of refusals that sandboxes have no part in.
const (
	codeMethod   sandbox.Code = "method_not_allowed"
	codeAccept   sandbox.Code = "not_acceptable"
	codeTooLarge sandbox.Code = "too_large"
	codeMedia    sandbox.Code = "unsupported_media_type"
	codeTimeout  sandbox.Code = "timeout"
	codeAudit    sandbox.Code = "audit_failed"
)

// Authenticator says whose credentials a request shows. Each front finds them in
// its own way: in a header, or in what the kernel knows of a socket.
type Authenticator interface {
	Authenticate(ctx context.Context, c access.Credentials) (access.Principal, error)
}

// authenticate says who makes a request: whose key or token it has, or, if it
// has none, which user is at the other end of the socket.
func (a *api) authenticate(r *http.Request) (access.Principal, error) {
	given := r.Header["Authorization"]
	if len(given) == 0 {
		uid, ok := r.Context().Value(peerKey).(uint32)
		if !ok {
			return access.Principal{}, sandbox.Errorf(access.CodeUnauthenticated, "the request has no API key").
				Try("Send it as `Authorization: Bearer KEY`; `agentrun key create` on the node makes one")
		}
		return a.Authenticator.Authenticate(r.Context(), access.Credentials{User: &uid})
	}
	text, ok := strings.CutPrefix(given[0], "Bearer ")
	if !ok || len(given) > 1 {
		return access.Principal{}, sandbox.Errorf(access.CodeUnauthenticated, "the Authorization header is not understood").
			Try("Send `Authorization: Bearer KEY`, once")
	}
	return a.Authenticator.Authenticate(r.Context(), access.Credentials{Bearer: text})
}

// withPeer notes which user is at the other end of a Unix socket.
func withPeer(ctx context.Context, conn net.Conn) context.Context {
	uid, err := peerUID(conn)
	if err != nil {
		return ctx // nobody: refused
	}
	return context.WithValue(ctx, peerKey, uid)
}

// peerUID is the user at the other end of a Unix socket.
func peerUID(conn net.Conn) (uint32, error) {
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
