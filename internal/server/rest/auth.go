package rest

import (
	"context"
	"net"
	"net/http"
	"strings"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// authenticate finds the principal of a request: that of its key or token, or,
// without one, the user at the other end of the socket.
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

// withPeer notes the user at the other end of a Unix socket.
func withPeer(ctx context.Context, conn net.Conn) context.Context {
	uid, err := server.PeerUID(conn)
	if err != nil {
		return ctx // without a user the request is refused
	}
	return context.WithValue(ctx, peerKey, uid)
}
