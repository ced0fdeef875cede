package access

import (
	"context"
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/sandbox"
)

// CodeUnauthenticated is the code of a request that nobody known makes.
const CodeUnauthenticated sandbox.Code = "unauthenticated"

// Credentials are what a request shows of who makes it.
type Credentials struct {
	// Bearer is an API key or the token of a sandbox.
	Bearer string
	// User is the user at the other end of a Unix socket, as the kernel says. Only
	// requests without a bearer have one.
	User *uint32
	// Component is who has shown its certificate, and Acting for whom it says that it
	// makes the request; nil is itself. Only requests over mutual TLS have them.
	Component *Component
	Acting    *Acting
}

// Authenticator knows whose keys and tokens the store has made, and the users of
// this machine who may use the socket.
type Authenticator struct {
	Store *Store
	// Sandbox finds the sandbox, which has not ended, that a token is for, and until when
	// the token is good.
	Sandbox func(context.Context, sandbox.Token) (sandbox.Sandbox, context.Context, error)
}

// Authenticate says whose the credentials are.
func (a Authenticator) Authenticate(ctx context.Context, c Credentials) (Principal, error) {
	switch {
	case c.Component != nil:
		return c.Component.Principal(c.Acting)
	case c.User != nil:
		return localUser(*c.User)
	}
	p, err := a.identify(ctx, c.Bearer)
	if err != nil {
		return Principal{}, sandbox.Errorf(CodeUnauthenticated, "the API key or token is not valid").Because("%v", err).
			Try("`agentrun key create` on the node makes a key")
	}
	return p, nil
}

func (a Authenticator) identify(ctx context.Context, text string) (Principal, error) {
	if !IsToken(text) {
		return a.Store.Find(text)
	}
	token := a.Store.Read(text)
	s, until, err := a.Sandbox(ctx, token)
	switch {
	case err == nil:
		p := OfSandbox(s)
		p.Until = until
		return p, nil
	case token.Derived != "":
		return Principal{}, errors.New("its sandbox has ended, or has another token")
	}
	return Principal{}, ErrUnknown
}

// localUser takes the user that the daemon runs as, and root.
func localUser(uid uint32) (Principal, error) {
	name := fmt.Sprintf("uid:%d", uid)
	if uid != 0 && int(uid) != os.Geteuid() {
		return Principal{Name: name}, sandbox.Errorf(sandbox.CodeDenied, "user %d may not use this socket", uid).
			Because("it is for user %d", os.Geteuid())
	}
	return Local(name), nil
}
