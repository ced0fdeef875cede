package access

import (
	"context"
	"errors"
	"fmt"
	"os"

	"agentrun.dev/internal/sandbox"
)

// CodeUnauthenticated is the code of a request without valid credentials.
const CodeUnauthenticated sandbox.Code = "unauthenticated"

// Credentials are shown by a request to prove its principal.
type Credentials struct {
	// Bearer is an API key or the token of a sandbox.
	Bearer string
	// User is the user at the other end of a Unix socket, as reported by the
	// kernel. Only requests without a bearer have one.
	User *uint32
	// Component is the component that has shown its certificate. Acting is the
	// principal that it names; nil means that it acts for itself. Only requests over
	// mutual TLS have them.
	Component *Component
	Acting    *Acting
}

// Authenticator accepts the keys of the store, the tokens of sandboxes, and the
// users of this machine who may use the socket.
type Authenticator struct {
	Store *Store
	// Sandbox finds the sandbox of a token, unless the sandbox has ended. The context
	// ends when the token becomes invalid.
	Sandbox func(context.Context, sandbox.Token) (sandbox.Sandbox, context.Context, error)
}

// Authenticate returns the principal of the credentials.
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

// localUser accepts root, and the user that the daemon runs as.
func localUser(uid uint32) (Principal, error) {
	name := fmt.Sprintf("uid:%d", uid)
	if uid != 0 && int(uid) != os.Geteuid() {
		return Principal{Name: name}, sandbox.Errorf(sandbox.CodeDenied, "user %d may not use this socket", uid).
			Because("it is for user %d", os.Geteuid())
	}
	return Local(name), nil
}
