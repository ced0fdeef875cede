package sandbox

import "context"

// Principal is who asks for something, as the server has found out: `uid:0` is
// root over the Unix socket.
type Principal string

type principalKey struct{}

// WithPrincipal says who asks for what is done with the context.
func WithPrincipal(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

// PrincipalOf is who asks; empty is nobody that is known.
func PrincipalOf(ctx context.Context) Principal {
	p, _ := ctx.Value(principalKey{}).(Principal)
	return p
}

// Shown is a principal in an error.
func (p Principal) Shown() string {
	if p == "" {
		return "somebody unknown"
	}
	return string(p)
}
