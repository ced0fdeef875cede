package sandbox

import "context"

// Principal identifies the maker of a request, as the server has authenticated
// it: `uid:0` is root over the Unix socket.
type Principal string

type principalKey struct{}

// WithPrincipal sets the principal of all work that is done with the returned
// ctx.
func WithPrincipal(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

// PrincipalOf returns the principal; it is empty if the principal is unknown.
func PrincipalOf(ctx context.Context) Principal {
	p, _ := ctx.Value(principalKey{}).(Principal)
	return p
}

// Shown returns the principal for an error's text.
func (p Principal) Shown() string {
	if p == "" {
		return "somebody unknown"
	}
	return string(p)
}
