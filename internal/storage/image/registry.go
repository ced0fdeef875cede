package image

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"strings"

	"agentrun.dev/internal/network/addresses"
	"github.com/google/go-containerregistry/pkg/name"
)

// Registries says how registries are reached. The zero value uses HTTPS with
// the certificates that the system trusts, for all of them.
type Registries struct {
	// Hosts are settings by host, or host:port.
	Hosts map[string]Registry `json:"registries"`
	// CAFiles are PEM files of authorities that are trusted for all hosts,
	// besides the system's.
	CAFiles []string `json:"caFiles,omitempty"`
	// Allow lists the registries, by host or host:port, that namespaces may use; nil
	// allows all at public addresses. A registry in the list decides which servers it
	// refers to for tokens and blobs.
	Allow []string `json:"allow,omitempty"`
	// Proxy sends pulls of namespaces through the proxy of the environment. The proxy then
	// decides which addresses may be reached. It needs Allow.
	Proxy bool `json:"proxy,omitempty"`
}

// Registry says how one registry is reached.
type Registry struct {
	// CAFile is a PEM file of authorities that are trusted for this host alone.
	CAFile string `json:"caFile,omitempty"`
	// PlainHTTP speaks HTTP without TLS to this host. It is never guessed, not
	// even for localhost or private addresses.
	PlainHTTP bool `json:"plainHTTP,omitempty"`
	// Addresses are closed addresses, or ranges, that the host may have when it serves a
	// namespace. A host that is itself an address need not repeat it.
	Addresses []string `json:"addresses,omitempty"`
	// Namespaces may use the node's credentials for this host, from docker's
	// configuration; * is all namespaces.
	Namespaces []string `json:"namespaces,omitempty"`
}

// LoadRegistries reads settings from a JSON file. If the file is missing, the
// settings are empty.
func LoadRegistries(path string) (r Registries, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		err = d.Decode(&r)
		// A surplus brace must not hide the settings after it, such as allow.
		if _, rest := d.Token(); err == nil && !errors.Is(rest, io.EOF) {
			err = errors.New("something follows the JSON object")
		}
	}
	if err == nil {
		err = r.Validate()
	}
	if err != nil {
		return r, fmt.Errorf("read the settings of registries in %s: %w", path, err)
	}
	return r, nil
}

// namespacePattern is the form of a namespace; * is all namespaces.
var namespacePattern = regexp.MustCompile(`^(\*|[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)$`)

// Validate checks the settings.
func (r Registries) Validate() error {
	for host, settings := range r.Hosts {
		if err := validHost(host); err != nil {
			return err
		}
		if _, err := settings.opens(host); err != nil {
			return fmt.Errorf("registry %q: %w", host, err)
		}
		for _, n := range settings.Namespaces {
			if !namespacePattern.MatchString(n) {
				return fmt.Errorf("registry %q: %q is no namespace: write its name, or * for all", host, n)
			}
		}
	}
	for _, host := range r.Allow {
		if err := validHost(host); err != nil {
			return fmt.Errorf("allow: %w", err)
		}
	}
	if r.Proxy && r.Allow == nil {
		return errors.New("proxy: behind a proxy the node cannot see which addresses namespaces reach: allow has to list the registries that they may name")
	}
	return nil
}

func validHost(host string) error {
	registry, err := name.NewRegistry(host)
	if err != nil || host == "" || strings.ContainsAny(host, "/@ ") || host != strings.ToLower(host) {
		return fmt.Errorf("registry %q: write its host, or host:port, in lower case", host)
	}
	if registry.RegistryStr() != host {
		return fmt.Errorf("registry %q: its host is %s", host, registry.RegistryStr())
	}
	return nil
}

// opens returns the ranges of closed addresses that a host may have.
func (r Registry) opens(host string) (out []netip.Prefix, err error) {
	if out, err = addresses.ParseRanges(r.Addresses); err != nil {
		return nil, fmt.Errorf("addresses: %w", err)
	}
	if a, err := addresses.ParsePrefix(hostOf(host)); err == nil && a.IsSingleIP() {
		out = append(out, a)
	}
	return out, nil
}

// hostOf is a host:port without its port, and without the brackets of IPv6.
func hostOf(host string) string { return (&url.URL{Host: host}).Hostname() }

func (r Registries) plainHTTP(host string) bool { return r.Hosts[strings.ToLower(host)].PlainHTTP }

// reference returns the reference in the form that the library needs to reach
// the registry.
func (r Registries) reference(ref Reference) (name.Reference, error) {
	if r.plainHTTP(ref.Registry()) {
		return name.ParseReference(ref.String(), name.Insecure)
	}
	return ref.ref, nil
}

// explain adds the next step to those errors of registries that have one.
func explain(err error, ref Reference) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	var unknownCA x509.UnknownAuthorityError
	switch {
	case strings.Contains(text, "server gave HTTP response to HTTPS client"):
		return fmt.Errorf("%w (%s speaks plain HTTP: --plain-http %s allows it, if you trust the network between)", err, ref.Registry(), ref.Registry())
	case errors.As(err, &unknownCA):
		return fmt.Errorf("%w (--ca-file names the certificate of a private authority)", err)
	case strings.Contains(text, "UNAUTHORIZED"), strings.Contains(text, "401 Unauthorized"):
		return fmt.Errorf("%w (credentials come from docker's configuration: docker login %s, or the file that DOCKER_CONFIG points to)", err, ref.Registry())
	}
	return err
}
