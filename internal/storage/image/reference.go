package image

import (
	"fmt"
	"regexp"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Reference names an image in the syntax of docker pull:
// [REGISTRY/]NAME[:TAG|@DIGEST]. Short and long forms of a name are equal.
type Reference struct{ ref name.Reference }

// repositoryPattern is that of the OCI distribution specification ("Pulling
// manifests"); the library accepts more.
var repositoryPattern = regexp.MustCompile(`^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*$`)

// ParseReference checks a reference.
func ParseReference(s string) (Reference, error) {
	ref, err := name.ParseReference(s)
	if err == nil && !repositoryPattern.MatchString(ref.Context().RepositoryStr()) {
		err = fmt.Errorf("%q is no name of a repository", ref.Context().RepositoryStr())
	}
	if err != nil {
		return Reference{}, fmt.Errorf("image %q: write [REGISTRY/]NAME[:TAG] or [REGISTRY/]NAME@sha256:DIGEST: %w", s, err)
	}
	return Reference{ref}, nil
}

// String is the long form, which names.json uses.
func (r Reference) String() string { return r.ref.Name() }

// Registry is the host[:port] that the image comes from.
func (r Reference) Registry() string { return r.ref.Context().RegistryStr() }

// DefaultPlatform is the platform of sandboxes.
const DefaultPlatform = "linux/amd64"

// Platform is an operating system and an architecture, such as linux/amd64.
type Platform struct{ OS, Architecture, Variant string }

// ParsePlatform checks a platform; "" is the default one.
func ParsePlatform(s string) (Platform, error) {
	if s == "" {
		s = DefaultPlatform
	}
	p, err := v1.ParsePlatform(s)
	if err != nil || p.OS == "" || p.Architecture == "" || p.OSVersion != "" {
		return Platform{}, fmt.Errorf("platform %q: write OS/ARCHITECTURE, such as %s", s, DefaultPlatform)
	}
	if p.OS != "linux" {
		return Platform{}, fmt.Errorf("platform %q: only Linux images have a root filesystem for sandboxes", s)
	}
	return Platform{OS: p.OS, Architecture: p.Architecture, Variant: p.Variant}, nil
}

func (p Platform) v1() v1.Platform {
	return v1.Platform{OS: p.OS, Architecture: p.Architecture, Variant: p.Variant}
}

func (p Platform) String() string { return p.v1().String() }
