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
	// Size is what it takes on the node's disk, in bytes.
	Size uint64
	// Stored is since when it is there.
	Stored time.Time
}

// maxImageName is the length of the longest name of an image, maxImageNames how many names
// one call may give.
const (
	maxImageName  = 1024
	maxImageNames = 32
)

// PublishRequest lets all namespaces use an image.
type PublishRequest struct {
	// Namespace is whose names are looked at first; empty is nobody's.
	Namespace Namespace
	// Image is a name, or a digest.
	Image string
	// Names are what it is published as; none is the name that it was found by.
	Names []string
}

// Validate refuses what no image is called.
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

// ValidImageName refuses what no image is called. What a name means, the store of images
// decides.
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

// dockerHub is what Docker's registry is called in names of images.
const dockerHub = "index.docker.io"

var hostName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)

// ParseRegistryHost checks a host. That of Docker's registry may be written docker.io.
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

// RegistryLogin is what anybody may know of a namespace's credentials for a registry: never
// the password.
type RegistryLogin struct {
	Namespace Namespace
	Registry  RegistryHost
	Username  string
	Changed   time.Time
}

// Password is never shown.
type Password string

// String tells nothing of it.
func (Password) String() string { return "Password{…}" }

// GoString is what %#v prints.
func (p Password) GoString() string { return p.String() }

// LogValue is what a log gets.
func (p Password) LogValue() slog.Value { return slog.StringValue(p.String()) }

// MarshalJSON refuses: only what is sealed is written, and nothing is answered.
func (Password) MarshalJSON() ([]byte, error) {
	return nil, errors.New("a password is not written as JSON")
}

// RegistryCredentials are what a registry knows a namespace by.
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

// Validate refuses what no header can carry. The error has no part of the password.
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

// WithAdministering says that whoever asks administers the node.
func WithAdministering(ctx context.Context) context.Context {
	return context.WithValue(ctx, administersKey{}, true)
}

// Administers reports whether whoever asks administers the node, and may know what the
// errors that tenants get leave out.
func Administers(ctx context.Context) bool {
	may, _ := ctx.Value(administersKey{}).(bool)
	return may
}
