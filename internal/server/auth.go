package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
)

// Codes of refusals that sandboxes have no part in.
const (
	codeUnauthenticated sandbox.Code = "unauthenticated"
	codeDenied          sandbox.Code = "permission_denied"
	codeMethod          sandbox.Code = "method_not_allowed"
	codeAccept          sandbox.Code = "not_acceptable"
	codeTooLarge        sandbox.Code = "too_large"
	codeMedia           sandbox.Code = "unsupported_media_type"
	codeTimeout         sandbox.Code = "timeout"
	codeAudit           sandbox.Code = "audit_failed"
)

// authenticate says who makes a request: whose key or token it has, or, if it
// has none, which user is at the other end of the socket.
func (a *api) authenticate(r *http.Request) (access.Principal, error) {
	given := r.Header["Authorization"]
	if len(given) == 0 {
		return localUser(r)
	}
	text, ok := strings.CutPrefix(given[0], "Bearer ")
	if !ok || len(given) > 1 {
		return access.Principal{}, sandbox.Errorf(codeUnauthenticated, "the Authorization header is not understood").
			Try("Send `Authorization: Bearer KEY`, once")
	}
	p, err := a.identify(r.Context(), text)
	if err != nil {
		e := sandbox.Errorf(codeUnauthenticated, "the API key or token is not valid").Because("%v", err)
		return access.Principal{}, e.Try("`agentrun key create` on the node makes a key")
	}
	return p, nil
}

func (a *api) identify(ctx context.Context, text string) (access.Principal, error) {
	if !access.IsToken(text) {
		return a.Access.Find(text)
	}
	id, err := a.Access.Sandbox(text)
	if err != nil {
		return access.Principal{}, err
	}
	s, err := a.Service.SandboxByID(ctx, id)
	if err != nil {
		return access.Principal{}, errors.New("its sandbox has ended")
	}
	return access.OfSandbox(s), nil
}

// localUser takes requests that come over a Unix socket from the user that the
// daemon runs as, or from root.
func localUser(r *http.Request) (access.Principal, error) {
	uid, ok := r.Context().Value(peerKey).(uint32)
	if !ok {
		return access.Principal{}, sandbox.Errorf(codeUnauthenticated, "the request has no API key").
			Try("Send it as `Authorization: Bearer KEY`; `agentrun key create` on the node makes one")
	}
	return localUID(uid)
}

// localUID takes the user that the daemon runs as, and root.
func localUID(uid uint32) (access.Principal, error) {
	name := fmt.Sprintf("uid:%d", uid)
	if uid != 0 && int(uid) != os.Geteuid() {
		return access.Principal{Name: name}, sandbox.Errorf(codeDenied, "user %d may not use this socket", uid).
			Because("it is for user %d", os.Geteuid())
	}
	return access.Local(name), nil
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
