package image

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/net/publicsuffix"
)

// gate is the only way to registries, and to the servers that they refer us to:
// token servers and stores of blobs.
type gate struct {
	registries Registries
	registry   string // that of the reference
	tenant     *Tenant
	others     *http.Transport
	byHost     map[string]*http.Transport
	proxies    sync.Map // host:port of the proxies in use
}

// Bounds of the time that we wait for a registry, and of the data that we read
// from it.
const (
	// headerTimeout is the time until a registry must answer.
	headerTimeout = time.Minute
	// dialTimeout and handshakeTimeout are those of a pull for a tenant.
	dialTimeout      = 10 * time.Second
	handshakeTimeout = 10 * time.Second
	maxHeader        = 256 << 10
	// maxError bounds an answer that is an error, maxManifest a manifest or an index, and
	// maxDocument any other document that is not a layer. A list of many empty objects
	// takes several hundred times as much memory as text.
	maxError    = 64 << 10
	maxManifest = 512 << 10
	maxDocument = maxConfig + 1
)

// transport makes the gate of a pull by a reference.
func (r Registries) transport(ref Reference, tenant *Tenant) (*gate, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	g := &gate{registries: r, registry: strings.ToLower(ref.Registry()), tenant: tenant, byHost: map[string]*http.Transport{}}
	if tenant != nil {
		if err := tenant.validate(); err != nil {
			return nil, err
		}
		if r.Allow != nil && !slices.Contains(r.Allow, g.registry) {
			return nil, refused{fmt.Sprintf("namespaces may not pull from %s on this node: its administrator lists the registries that they may (allow, in the settings of registries)", g.registry)}
		}
	}
	var err error
	if g.others, err = g.newTransport(r.CAFiles, nil); err != nil {
		return nil, err
	}
	// A registry that is not in the settings may not reach closed addresses, not even
	// those of registries in the settings.
	_, named := r.Hosts[g.registry]
	for host, settings := range r.Hosts {
		opens, err := settings.opens(host)
		if err != nil {
			return nil, err
		}
		if !named {
			opens = nil
		}
		files := slices.Clone(r.CAFiles)
		if settings.CAFile != "" {
			files = append(files, settings.CAFile)
		}
		if g.byHost[host], err = g.newTransport(files, opens); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// newTransport makes the transport for hosts that may have closed addresses of some
// ranges.
func (g *gate) newTransport(caFiles []string, opens []netip.Prefix) (*http.Transport, error) {
	base, ok := remote.DefaultTransport.(*http.Transport)
	if !ok {
		return nil, errors.New("the registry library has no transport that can be set up")
	}
	t := base.Clone()
	t.ResponseHeaderTimeout, t.MaxResponseHeaderBytes = headerTimeout, maxHeader
	if g.tenant != nil {
		t.TLSHandshakeTimeout = handshakeTimeout
		t.Proxy = nil
		guarded := g.dialer(opens).DialContext
		t.DialContext = guarded
		if g.registries.Proxy { // its settings were checked: the registry is one of a list
			t.Proxy = g.proxy
			t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
				if _, ok := g.proxies.Load(address); ok {
					return base.DialContext(ctx, network, address)
				}
				return guarded(ctx, network, address)
			}
		}
	}
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

// proxy is the proxy of the environment. It may have a closed address.
func (g *gate) proxy(req *http.Request) (*url.URL, error) {
	u, err := http.ProxyFromEnvironment(req)
	if err != nil || u == nil {
		return nil, err
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[u.Scheme]
	}
	g.proxies.Store(net.JoinHostPort(u.Hostname(), port), true)
	return u, nil
}

// dialer connects to no closed address except those in opens. It checks the address that
// a socket is about to be connected to, which no answer of DNS can change any more.
func (g *gate) dialer(opens []netip.Prefix) *net.Dialer {
	return &net.Dialer{
		Timeout: dialTimeout, Resolver: g.tenant.resolver,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			at, err := netip.ParseAddrPort(address)
			if err != nil {
				return fmt.Errorf("%q is no address to connect to", address)
			}
			return g.check(at.Addr(), opens)
		},
	}
}

// check refuses a closed address that is not in opens.
func (g *gate) check(a netip.Addr, opens []netip.Prefix) error {
	v := g.tenant.Guard.Check(a)
	if !v.Closed() || slices.ContainsFunc(opens, v.OpenedBy) {
		return nil
	}
	return fmt.Errorf("%s (to open it for a registry, its entry in the settings of registries has to have the address in addresses, and the registry that the image is named by an entry, too)", v.Reason)
}

// RoundTrip refuses plain HTTP to hosts that it is not allowed for, and TLS to those that it
// is allowed for: neither is ever tried to see which works. For a tenant it refuses more.
func (g *gate) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := g.send(req)
	if err == nil && req.Method == http.MethodGet {
		// The library computes a manifest's digest, but takes it from this header if the
		// registry says that the manifest is of Docker's first, signed form. So a registry
		// could give any content for a digest.
		res.Header.Del("Docker-Content-Digest")
	}
	return res, err
}

func (g *gate) send(req *http.Request) (*http.Response, error) {
	host := strings.ToLower(req.URL.Host)
	switch plain := g.registries.plainHTTP(host); {
	case req.URL.Scheme == "http" && !plain:
		return nil, refused{fmt.Sprintf("plain HTTP to %s is not allowed", host)}
	case req.URL.Scheme == "https" && plain:
		return nil, refused{fmt.Sprintf("%s is to be spoken to in plain HTTP", host)}
	}
	if g.tenant == nil {
		return g.to(host).RoundTrip(req)
	}
	if err := g.mayHear(host, req); err != nil {
		return nil, err
	}
	if a, err := netip.ParseAddr(hostOf(host)); err == nil && g.registries.Proxy {
		if err := g.check(a, nil); err != nil {
			return nil, &Unreachable{g.registry, err}
		}
	}
	res, err := g.to(host).RoundTrip(req)
	if err != nil {
		return nil, &Unreachable{g.registry, fmt.Errorf("%s %s: %w", req.Method, host, err)}
	}
	res.Body = &discreet{res.Body, g.registry}
	switch {
	case res.StatusCode >= http.StatusBadRequest:
		res.Body = &bounded{ReadCloser: res.Body, left: maxError}
	case wantsManifest(req):
		res.Body = &bounded{ReadCloser: res.Body, left: maxManifest, strict: true}
	case req.Context().Value(layerBody{}) == nil:
		res.Body = &bounded{ReadCloser: res.Body, left: maxDocument, strict: true}
	}
	return res, nil
}

func (g *gate) to(host string) *http.Transport {
	if t := g.byHost[host]; t != nil {
		return t
	}
	return g.others
}

// mayHear refuses to send the credentials for a registry to a host that is neither of its
// site nor in the settings.
func (g *gate) mayHear(host string, req *http.Request) error {
	tells := strings.HasPrefix(req.Header.Get("Authorization"), "Basic ") || req.Method == http.MethodPost
	if _, named := g.registries.Hosts[host]; !tells || named || sameSite(host, g.registry) {
		return nil
	}
	return refused{fmt.Sprintf("%s sends those with credentials to %s, which is of another site: they are not told there, unless the settings of registries name that host", g.registry, host)}
}

// sameSite reports whether two hosts are the same, or belong to one registered domain.
func sameSite(a, b string) bool {
	if a == b {
		return true
	}
	siteA, errA := publicsuffix.EffectiveTLDPlusOne(hostOf(a))
	siteB, errB := publicsuffix.EffectiveTLDPlusOne(hostOf(b))
	isAddress := net.ParseIP(hostOf(a)) != nil || net.ParseIP(hostOf(b)) != nil
	return errA == nil && errB == nil && !isAddress && siteA == siteB
}

func (g *gate) close() {
	g.others.CloseIdleConnections()
	for _, t := range g.byHost {
		t.CloseIdleConnections()
	}
}

// wantsManifest reports whether the original request was for a manifest, before any redirects.
func wantsManifest(req *http.Request) bool {
	for req.Response != nil && req.Response.Request != nil {
		req = req.Response.Request
	}
	return path.Base(path.Dir(req.URL.Path)) == "manifests" // …/manifests/TAG
}

// discreet is a body for a tenant. The error of a broken connection contains the addresses of
// both ends, one of which is the node's.
type discreet struct {
	io.ReadCloser
	registry string
}

func (d *discreet) Read(p []byte) (int, error) {
	n, err := d.ReadCloser.Read(p)
	switch {
	case err == nil, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return n, err
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return n, err
	}
	return n, &Unreachable{d.registry, err}
}

// layerBody marks the ctx of a request for a layer, whose size its reader bounds.
type layerBody struct{}

// bounded is a body that ends after this many bytes. A strict one ends with an
// error.
type bounded struct {
	io.ReadCloser
	left   int64
	strict bool
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		if b.strict {
			return 0, fmt.Errorf("%w: an answer of more bytes than such a one may have", errWrongContent)
		}
		return 0, io.EOF
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}
