package image

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"unicode"

	"agentrun.dev/internal/network/addresses"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// Tenant is the namespace that an image is pulled for, if it is not pulled for root. It
// chooses the registry and may run it, so it is not trusted with the addresses that the
// node connects to.
type Tenant struct {
	// Namespace gets the name of the image.
	Namespace string
	// Credentials returns the namespace's own credentials for a registry; nil
	// means that it has no credentials.
	Credentials func(registry string) (user, password string, ok bool)
	// Guard decides which addresses are closed.
	Guard *addresses.Guard

	resolver *net.Resolver // nil is the system's; tests have their own
}

func (t *Tenant) validate() error {
	if t.Guard == nil || t.Namespace == "" || !namespacePattern.MatchString(t.Namespace) {
		return errors.New("a pull for a namespace needs its name, and a guard of addresses")
	}
	return nil
}

// keychain finds the credentials for the registry of a reference: a namespace's own, or
// those of the node if they serve the namespace. Root's are those of docker's configuration.
func (r Registries) keychain(ref Reference, t *Tenant) authn.Keychain {
	if t == nil {
		return authn.DefaultKeychain
	}
	return keychain(func(resource authn.Resource) (authn.Authenticator, error) {
		host := strings.ToLower(resource.RegistryStr())
		if host != strings.ToLower(ref.Registry()) {
			return authn.Anonymous, nil
		}
		if t.Credentials != nil {
			if user, password, ok := t.Credentials(host); ok {
				return &authn.Basic{Username: user, Password: password}, nil
			}
		}
		serves := r.Hosts[host].Namespaces
		if slices.Contains(serves, "*") || slices.Contains(serves, t.Namespace) {
			return authn.DefaultKeychain.Resolve(resource)
		}
		return authn.Anonymous, nil
	})
}

type keychain func(authn.Resource) (authn.Authenticator, error)

// Resolve implements authn.Keychain.
func (k keychain) Resolve(r authn.Resource) (authn.Authenticator, error) { return k(r) }

// Unreachable says that a registry, or a server that it refers to, gave a tenant no HTTP
// answer. Its text is the same for every cause: a closed address, a name that DNS does not
// know, or a failure of the connection, of TLS or of a certificate. Otherwise tenants
// could explore the node's network. Administrators are told the cause.
type Unreachable struct {
	registry string
	cause    error
}

// Error does not include the cause.
func (e *Unreachable) Error() string {
	return fmt.Sprintf("the registry %s, or a server that it leads to, cannot be reached or may not be: ask an administrator of the node, who can see the cause", e.registry)
}

// Unwrap returns the cause to programs.
func (e *Unreachable) Unwrap() error { return e.cause }

// refused says that the node's settings forbid a request. All users may see its
// text.
type refused struct{ text string }

func (e refused) Error() string { return e.text }

// hidden is an error whose text is for tenants, while programs find the wrapped
// error.
type hidden struct {
	text, cause string
	err         error
}

func (e hidden) Error() string     { return e.text }
func (e hidden) Unwrap() error     { return e.err }
func (e hidden) ForAdmins() string { return e.cause }

// explainTenant turns the error of a pull into one that a tenant may read.
func explainTenant(err error, ref Reference) error {
	var unreachable *Unreachable
	var forbidden refused
	var answer *transport.Error
	switch {
	case errors.As(err, &unreachable):
		return hidden{unreachable.Error(), clean(unreachable.cause.Error()), err}
	case errors.As(err, &answer):
		return hidden{clean(answered(answer, ref)), clean(answer.Error()), err}
	case errors.As(err, &forbidden):
		return hidden{clean(forbidden.text), clean(forbidden.text), err}
	}
	return hidden{clean(err.Error()), clean(err.Error()), err}
}

// answered describes a registry's answer, without the addresses of its servers.
func answered(e *transport.Error, ref Reference) string {
	text := fmt.Sprintf("the registry %s answers %d %s", ref.Registry(), e.StatusCode, http.StatusText(e.StatusCode))
	for i, d := range e.Errors {
		if i == 3 {
			break
		}
		text += fmt.Sprintf("; %s: %s", d.Code, d.Message)
	}
	if e.StatusCode == http.StatusUnauthorized || e.StatusCode == http.StatusForbidden {
		text += ". Credentials of a namespace are set with agentrun registry login"
	}
	return text
}

// maxText bounds the text of an error that contains words of a registry.
const maxText = 1 << 10

// clean makes untrusted text fit for a line of a log.
func clean(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "…"
	}
	return text
}
