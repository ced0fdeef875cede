package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/sandbox"
)

// Principal is who makes a request.
type Principal struct{ Name string }

// Codes of refusals that sandboxes have no part in.
const (
	codeUnauthenticated sandbox.Code = "unauthenticated"
	codeDenied          sandbox.Code = "permission_denied"
	codeMethod          sandbox.Code = "method_not_allowed"
	codeAccept          sandbox.Code = "not_acceptable"
	codeTooLarge        sandbox.Code = "too_large"
	codeMedia           sandbox.Code = "unsupported_media_type"
	codeTimeout         sandbox.Code = "timeout"
)

// minToken is the shortest token that is taken: 128 bits in base64.
const minToken = 22

// Token takes requests with the bearer token that a file holds, which nobody
// but its owner may be able to read.
func Token(file string) (func(*http.Request) (Principal, error), error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("read the token: others may read %s (mode %04o). Run `chmod 600 %s`", file, info.Mode().Perm(), file)
	}
	token, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	token = bytes.TrimSpace(token)
	if len(token) < minToken {
		return nil, fmt.Errorf("read the token: %s has fewer than %d characters. Put a random one there", file, minToken)
	}
	// Digests have one length, so that the comparison does not tell the token's.
	want := sha256.Sum256(token)
	return func(r *http.Request) (Principal, error) {
		given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !ok {
			return Principal{}, sandbox.Errorf(codeUnauthenticated, "the request has no token").
				Try("Send it as `Authorization: Bearer TOKEN`")
		}
		if got := sha256.Sum256([]byte(given)); subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			return Principal{}, sandbox.Errorf(codeUnauthenticated, "the token is not valid")
		}
		return Principal{Name: "token"}, nil
	}, nil
}

// LocalUser takes requests that come over a Unix socket from the user that the
// daemon runs as, or from root.
func LocalUser(r *http.Request) (Principal, error) {
	uid, ok := r.Context().Value(peerKey).(uint32)
	if !ok {
		return Principal{}, sandbox.Errorf(codeUnauthenticated, "the request did not come over the Unix socket")
	}
	return localUser(uid)
}

// localUser takes the user that the daemon runs as, and root.
func localUser(uid uint32) (Principal, error) {
	if uid != 0 && int(uid) != os.Geteuid() {
		return Principal{}, sandbox.Errorf(codeDenied, "user %d may not use this socket", uid).
			Because("it is for user %d", os.Geteuid())
	}
	return Principal{Name: fmt.Sprintf("uid:%d", uid)}, nil
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
