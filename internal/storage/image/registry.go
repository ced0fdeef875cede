package image

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// Registries says how registries are reached. The zero value is HTTPS with the
// certificates that the system trusts, for all of them.
type Registries struct {
	// Hosts are settings by host, or host:port.
	Hosts map[string]Registry `json:"registries"`
	// CAFiles are PEM files of authorities that are trusted beside the
	// system's, for all hosts.
	CAFiles []string `json:"caFiles,omitempty"`
}

// Registry is how one registry is reached.
type Registry struct {
	// CAFile is a PEM file of authorities that are trusted for this host alone.
	CAFile string `json:"caFile,omitempty"`
	// PlainHTTP speaks HTTP without TLS to this host. It is never guessed: not
	// for localhost and not for private addresses either.
	PlainHTTP bool `json:"plainHTTP,omitempty"`
}

// LoadRegistries reads settings from a JSON file; a missing one has none.
func LoadRegistries(path string) (r Registries, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		err = d.Decode(&r)
	}
	if err == nil {
		err = r.Validate()
	}
	if err != nil {
		return r, fmt.Errorf("read the settings of registries in %s: %w", path, err)
	}
	return r, nil
}

// Validate checks the hosts' names.
func (r Registries) Validate() error {
	for host := range r.Hosts {
		registry, err := name.NewRegistry(host)
		if err != nil || host == "" || strings.ContainsAny(host, "/@ ") || host != strings.ToLower(host) {
			return fmt.Errorf("registry %q: write its host, or host:port, in lower case", host)
		}
		if registry.RegistryStr() != host {
			return fmt.Errorf("registry %q: its host is %s", host, registry.RegistryStr())
		}
	}
	return nil
}

func (r Registries) plainHTTP(host string) bool { return r.Hosts[strings.ToLower(host)].PlainHTTP }

// reference is the reference as the library wants it to reach the registry.
func (r Registries) reference(ref Reference) (name.Reference, error) {
	if r.plainHTTP(ref.Registry()) {
		return name.ParseReference(ref.String(), name.Insecure)
	}
	return ref.ref, nil
}

// gate is the only way to registries, and to where they send us: token servers
// and stores of blobs.
type gate struct {
	registries Registries
	others     *http.Transport
	byHost     map[string]*http.Transport
}

func (r Registries) transport() (*gate, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	others, err := newTransport(r.CAFiles)
	if err != nil {
		return nil, err
	}
	g := &gate{registries: r, others: others, byHost: map[string]*http.Transport{}}
	for host, settings := range r.Hosts {
		if settings.CAFile == "" {
			continue
		}
		if g.byHost[host], err = newTransport(append(slices.Clone(r.CAFiles), settings.CAFile)); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// headerTimeout is how long a registry may think before it answers.
const headerTimeout = time.Minute

func newTransport(caFiles []string) (*http.Transport, error) {
	base, ok := remote.DefaultTransport.(*http.Transport)
	if !ok {
		return nil, errors.New("the registry library has no transport that can be set up")
	}
	t := base.Clone()
	t.ResponseHeaderTimeout = headerTimeout
	if len(caFiles) == 0 {
		return t, nil
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("read the system's certificates: %w", err)
	}
	for _, file := range caFiles {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read certificate authority: %w", err)
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("certificate authority %s: it holds no PEM certificate", file)
		}
	}
	t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	return t, nil
}

// RoundTrip refuses plain HTTP to hosts that it was not allowed for, and TLS to
// those that it was: neither is ever tried to see which works.
func (g *gate) RoundTrip(req *http.Request) (*http.Response, error) {
	host := strings.ToLower(req.URL.Host)
	switch plain := g.registries.plainHTTP(host); {
	case req.URL.Scheme == "http" && !plain:
		return nil, fmt.Errorf("plain HTTP to %s is not allowed", host)
	case req.URL.Scheme == "https" && plain:
		return nil, fmt.Errorf("%s is to be spoken to in plain HTTP", host)
	}
	if t := g.byHost[host]; t != nil {
		return t.RoundTrip(req)
	}
	return g.others.RoundTrip(req)
}

func (g *gate) close() {
	g.others.CloseIdleConnections()
	for _, t := range g.byHost {
		t.CloseIdleConnections()
	}
}

// explain adds the next step to errors of registries that have one.
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
