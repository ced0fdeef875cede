package access

import (
	"crypto/x509"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"agentrun.dev/internal/sandbox"
)

// Component is a part of a cluster, as named by its certificate. The zero value is
// no component.
type Component struct {
	// Role is RoleController, RoleGateway or RoleNode.
	Role Role
	Name string
}

// componentRoles are the roles that a certificate can give.
var componentRoles = []Role{RoleController, RoleGateway, RoleNode}

// A certificate names its component in its only URI,
// spiffe://agentrun.dev/ROLE/NAME.
const (
	uriScheme    = "spiffe"
	uriAuthority = "agentrun.dev"
)

// componentName is the name of a Kubernetes node or Pod: a DNS name.
var componentName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

// ParseComponent checks a role and a name.
func ParseComponent(role, name string) (Component, error) {
	if !slices.Contains(componentRoles, Role(role)) {
		return Component{}, sandbox.Errorf(sandbox.CodeInvalid, "the role %s is not one of a certificate", sandbox.Quote(role)).
			Try("Use %s, %s or %s", RoleController, RoleGateway, RoleNode)
	}
	if !componentName.MatchString(name) {
		return Component{}, sandbox.Errorf(sandbox.CodeInvalid, "the name %s is not valid in a certificate", sandbox.Quote(name)).
			Because("it is not 1 to 253 lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit")
	}
	return Component{Role: Role(role), Name: name}, nil
}

// String is ROLE:NAME, the name of the component as a principal.
func (c Component) String() string {
	if c == (Component{}) {
		return ""
	}
	return string(c.Role) + ":" + c.Name
}

// URI returns the URI in the component's certificate.
func (c Component) URI() *url.URL {
	return &url.URL{Scheme: uriScheme, Host: uriAuthority, Path: "/" + string(c.Role) + "/" + c.Name}
}

// ComponentOf reads the component from a certificate whose signature was verified.
// It refuses a certificate that leaves any doubt: another form, or a second URI.
func ComponentOf(cert *x509.Certificate) (Component, error) {
	refuse := func(format string, a ...any) (Component, error) {
		return Component{}, sandbox.Errorf(CodeUnauthenticated, "the certificate gives no role").Because(format, a...).
			Try("Issue it with the one URI %s://%s/ROLE/NAME; docs/security.md has the roles", uriScheme, uriAuthority)
	}
	if len(cert.URIs) != 1 {
		return refuse("it has %d URIs, not one", len(cert.URIs))
	}
	uri := cert.URIs[0]
	parts := strings.Split(uri.Path, "/")
	if len(parts) != 3 {
		return refuse("its URI is %s", sandbox.Quote(uri.String()))
	}
	c, err := ParseComponent(parts[1], parts[2])
	// Compared as a whole, so that no user, port, query, fragment or escape goes
	// unseen.
	if err != nil || c.URI().String() != uri.String() {
		return refuse("its URI is %s", sandbox.Quote(uri.String()))
	}
	return c, nil
}

// Acting names the principal that a component makes a call for. Role and Namespaces
// are the rights that the component gives this principal.
type Acting struct {
	Principal  string
	Role       Role
	Namespaces []sandbox.Namespace
}

// Bounds of the fields that name a principal.
const (
	maxPrincipal  = 300
	maxUserName   = 256
	maxNamespaced = maxNamespaces * 64
)

// nameable is a kind of principal that components may name. No prefix is also that of the
// node's own principals or of a component, so a named principal never passes for one of
// these.
type nameable struct {
	prefix string
	by     Role
	check  func(string) error
	// whole says that the principal is a namespace: it has the rights of a user there.
	whole bool
}

// nameables has all kinds. No component may name a principal of another kind.
var nameables = []nameable{
	// A namespace, for requests that Kubernetes allows there by RBAC.
	{prefix: "kubernetes:", by: RoleController, whole: true, check: func(s string) error { _, err := sandbox.ParseName(s); return err }},
	// A user whom Kubernetes has reviewed for a gateway.
	{prefix: "kubernetes-user:", by: RoleGateway, check: checkUserName},
	// An API key that is a gateway's own.
	{prefix: "gateway-key:", by: RoleGateway, check: func(s string) error { _, err := ParseKeyID(s); return err }},
}

// checkUserName accepts names that fit unchanged into metadata and into one word of
// a log.
func checkUserName(s string) error {
	if s == "" || len(s) > maxUserName || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return sandbox.Errorf(sandbox.CodeInvalid, "the name of the user is not 1 to %d printable ASCII characters", maxUserName)
	}
	return nil
}

// ParseActing checks the fields of a call that name its principal. Without a principal
// all fields must be empty. The result is nil then: the component acts for itself.
func ParseActing(principal, role, namespaces string) (*Acting, error) {
	invalid := func(format string, a ...any) (*Acting, error) {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the principal of the call: "+format, a...)
	}
	if principal == "" {
		if role != "" || namespaces != "" {
			return invalid("a role or namespaces are given, and no principal")
		}
		return nil, nil
	}
	if len(principal) > maxPrincipal || len(namespaces) > maxNamespaced {
		return invalid("it is too long")
	}
	kind := nameableOf(principal)
	if kind == nil {
		return invalid("%s is of a kind that nobody names", sandbox.Quote(principal))
	}
	name := strings.TrimPrefix(principal, kind.prefix)
	if err := kind.check(name); err != nil {
		return nil, err
	}
	a := &Acting{Principal: principal, Role: Role(role)}
	if kind.whole {
		if role != "" || namespaces != "" {
			return invalid("%s already says its role and its namespace", principal)
		}
		a.Role, a.Namespaces = RoleUser, []sandbox.Namespace{sandbox.Namespace(name)}
		return a, nil
	}
	var err error
	if namespaces != "" {
		if a.Namespaces, err = ParseNamespaces(strings.Split(namespaces, ",")); err != nil {
			return nil, err
		}
	}
	a.Namespaces, err = checkGrant(a.Role, a.Namespaces)
	return a, err
}

// Fields returns the fields from which ParseActing reads a.
func (a Acting) Fields() (principal, role, namespaces string) {
	if kind := nameableOf(a.Principal); kind != nil && kind.whole {
		return a.Principal, "", ""
	}
	var list []string
	for _, n := range a.Namespaces {
		list = append(list, string(n))
	}
	return a.Principal, string(a.Role), strings.Join(list, ",")
}

func nameableOf(principal string) *nameable {
	i := slices.IndexFunc(nameables, func(k nameable) bool { return strings.HasPrefix(principal, k.prefix) })
	if i < 0 {
		return nil
	}
	return &nameables[i]
}

// Principal returns the principal of a component's call: the one that the component
// names, if its role may name it, or else the component itself.
func (c Component) Principal(acting *Acting) (Principal, error) {
	self := Principal{Name: c.String(), Role: c.Role, Namespaces: []sandbox.Namespace{AllNamespaces}, Via: c}
	if acting == nil {
		return self, nil
	}
	if kind := nameableOf(acting.Principal); kind == nil || kind.by != c.Role {
		return self, sandbox.Errorf(sandbox.CodeDenied, "a certificate of the role %s cannot act for %s", c.Role, sandbox.Quote(acting.Principal)).
			Try("docs/security.md has the principals that each role may name")
	}
	return Principal{Name: acting.Principal, Role: acting.Role, Namespaces: acting.Namespaces, Via: c}, nil
}
