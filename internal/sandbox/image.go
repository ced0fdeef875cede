package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Image is an image of the node, as a namespace sees it.
type Image struct {
	Digest string
	// Names are the namespace's own and the published ones, sorted.
	Names []string
	// Published says that all namespaces may use it.
	Published bool
	Platform  string
	// Size is its size on the node's disk, in bytes.
	Size uint64
	// Stored is the time at which it was stored.
	Stored time.Time
}

// maxImageName is the length of the longest name of an image. maxImageNames is the
// greatest number of names in one call.
const (
	maxImageName  = 1024
	maxImageNames = 32
)

// PublishRequest lets all namespaces use an image.
type PublishRequest struct {
	// Namespace is the namespace whose names are looked up first; if it is empty, no
	// namespace's names are.
	Namespace Namespace
	// Image is a name, or a digest.
	Image string
	// Names are the names to publish it as; empty publishes it under the name
	// that it was found by.
	Names []string
}

// Validate refuses names that no image can have.
func (r PublishRequest) Validate() error {
	if len(r.Names) > maxImageNames {
		return Invalid("names", "%d are more than %d", len(r.Names), maxImageNames)
	}
	for _, name := range r.Names {
		if err := ValidImageName("names", name); err != nil {
			return err
		}
	}
	return ValidImageName("image", r.Image)
}

var imageName = regexp.MustCompile(`^[-A-Za-z0-9._:/@\[\]]+$`)

// ValidImageName refuses a name that no image can have. The image store decides which
// image a name refers to.
func ValidImageName(field, name string) error {
	if len(name) > maxImageName || !imageName.MatchString(name) {
		return Invalid(field, "%s is no name of an image, and no digest", Quote(name))
	}
	return nil
}

// RegistryHost is the host, or host:port, of a registry, in lower case.
type RegistryHost string

// maxRegistryHost is the length of the longest host.
const maxRegistryHost = 128

// dockerHub is the host of Docker's registry in names of images.
const dockerHub = "index.docker.io"

var hostName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)

// ParseRegistryHost checks a host. The host of Docker's registry may be written
// docker.io.
func ParseRegistryHost(s string) (RegistryHost, error) {
	if s == "docker.io" {
		return dockerHub, nil
	}
	u := url.URL{Host: s}
	host, port := u.Hostname(), u.Port()
	number, err := strconv.ParseUint(port, 10, 16)
	badPort := port != "" && (err != nil || number == 0 || strconv.FormatUint(number, 10) != port)
	a, notAddress := netip.ParseAddr(host)
	whole := host
	if strings.Contains(host, ":") {
		whole = "[" + host + "]"
	}
	if port != "" {
		whole += ":" + port
	}
	named := len(s) <= maxRegistryHost && hostName.MatchString(host)
	// Others are the first part of a name in Docker's registry.
	isHost := host == "localhost" || strings.ContainsAny(s, ".:")
	if !isHost || badPort || whole != s || !named && (notAddress != nil || a.String() != host || a.Zone() != "") {
		return "", Invalid("registry", "%s is no host of a registry: write HOST or HOST:PORT, in lower case", Quote(s))
	}
	return RegistryHost(s), nil
}

// RegistryLogin is the public part of a namespace's credentials for a registry: never the
// password.
type RegistryLogin struct {
	Namespace Namespace
	Registry  RegistryHost
	Username  string
	Changed   time.Time
}

// Password is never shown.
type Password string

// String never shows the password.
func (Password) String() string { return "Password{…}" }

// GoString serves %#v.
func (p Password) GoString() string { return p.String() }

// LogValue serves logs.
func (p Password) LogValue() slog.Value { return slog.StringValue(p.String()) }

// MarshalJSON always fails: a password is only stored sealed, and never part of
// an answer.
func (Password) MarshalJSON() ([]byte, error) {
	return nil, errors.New("a password is not written as JSON")
}

// RegistryCredentials identify a namespace to a registry.
type RegistryCredentials struct {
	Username string
	Password Password
}

// Bounds of credentials: some registries' passwords are documents with a key.
const (
	MaxRegistryLogins = 64
	maxUsername       = 255
	maxPassword       = 16 << 10
)

// Validate refuses credentials that no header can carry. The error includes no part
// of the password.
func (c RegistryCredentials) Validate() error {
	control := func(r rune) bool { return r < ' ' && r != '\n' && r != '\r' && r != '\t' || r == 0x7f }
	switch {
	case c.Username == "" || len(c.Username) > maxUsername || strings.ContainsFunc(c.Username, func(r rune) bool { return r <= ' ' || r == ':' || r == 0x7f }):
		return Invalid("username", "it has to be 1 to %d characters, without spaces and colons", maxUsername)
	case c.Password == "" || len(c.Password) > maxPassword || strings.ContainsFunc(string(c.Password), control):
		return Invalid("password", "it has to be 1 to %d bytes of text", maxPassword)
	}
	return nil
}

// SortedLogins sorts by registry.
func SortedLogins(list []RegistryLogin) []RegistryLogin {
	slices.SortFunc(list, func(a, b RegistryLogin) int { return strings.Compare(string(a.Registry), string(b.Registry)) })
	return list
}

type administersKey struct{}

// WithAdministering says that the principal of the request administers the
// node.
func WithAdministering(ctx context.Context) context.Context {
	return context.WithValue(ctx, administersKey{}, true)
}

// Administers reports whether the principal of the request administers the node. An
// administrator also sees the details that errors for tenants leave out.
func Administers(ctx context.Context) bool {
	may, _ := ctx.Value(administersKey{}).(bool)
	return may
}
