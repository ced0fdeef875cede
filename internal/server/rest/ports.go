package rest

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// portsRoute stands for all requests to ports, by path or by host name. No mux
// routes them: the path after the port is the program's, byte for byte.
const portsRoute = "* /v1/namespaces/{namespace}/sandboxes/{name}/ports/{port}/{path...}"

// accessHeader may carry a token, as the Authorization header does. It is for
// clients that cannot choose the latter.
const accessHeader = "X-Access-Token"

// cookiePrefix begins the names of the daemon's own cookies.
const cookiePrefix = "agentrun_"

// portTarget is the port that a request is for.
type portTarget struct {
	// namespace and name are as the path has them, id as the host name has it.
	namespace, name string
	id              sandbox.ID
	port            uint16
	// path is the path for the program, as the client wrote it.
	path string
	// prefix is the part of the client's path before that; it is empty for host
	// names.
	prefix string
}

// portTarget finds the port that a request is for. It returns nil for a request
// that is for no port. It looks only at the request.
func (a *api) portTarget(r *http.Request) (*portTarget, error) {
	if to, err := a.portOfHost(r); to != nil || err != nil {
		return to, err
	}
	return portOfPath(rawPath(r))
}

// rawPath is the path of a request as the client wrote it.
func rawPath(r *http.Request) string {
	raw, _, _ := strings.Cut(r.RequestURI, "?")
	if _, rest, absolute := strings.Cut(raw, "://"); absolute && raw[0] != '/' {
		if i := strings.IndexByte(rest, '/'); i >= 0 {
			return rest[i:]
		}
		return "/"
	}
	return raw
}

// portOfPath parses /v1/namespaces/NAMESPACE/sandboxes/NAME/ports/PORT/…. It
// does not look at the path after the port.
func portOfPath(raw string) (*portTarget, error) {
	parts := strings.SplitN(raw, "/", 9)
	if len(parts) < 8 || parts[0] != "" || parts[1] != "v1" || parts[2] != "namespaces" || parts[4] != "sandboxes" || parts[6] != "ports" {
		return nil, nil
	}
	port, err := parsePort(parts[7])
	if err != nil {
		return nil, err
	}
	to := &portTarget{namespace: parts[3], name: parts[5], port: port, prefix: strings.Join(parts[:8], "/")}
	if len(parts) == 9 {
		to.path = "/" + parts[8]
	}
	return to, nil
}

// parsePort reads a port as it is written in a path or a host name.
func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || s[0] == '0' || s[0] == '+' {
		return 0, sandbox.Invalid("port", "%q is not a number from 1 to 65535", server.Trimmed(s))
	}
	return uint16(n), nil
}

// portOfHost parses the host name PORT-ID.DOMAIN. Other host names below the
// domain are refused: they never reach the API.
func (a *api) portOfHost(r *http.Request) (*portTarget, error) {
	if a.Domain == "" {
		return nil, nil
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	label, below := strings.CutSuffix(host, "."+a.Domain)
	if !below {
		return nil, nil
	}
	number, text, _ := strings.Cut(label, "-")
	port, err := parsePort(number)
	var id sandbox.ID
	if err == nil {
		id, err = sandbox.ParseID(text)
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "no sandbox has the host name %q", server.Trimmed(host)).
			Try("The host name of a port is PORT-ID.%s, with the sandbox's id", a.Domain)
	}
	to := &portTarget{id: id, port: port, path: rawPath(r)}
	if !strings.HasPrefix(to.path, "/") {
		return nil, sandbox.Errorf(server.CodeMethod, "%s is not something that can be done with a port", server.Trimmed(r.Method))
	}
	return to, nil
}

// domainSyntax is a DNS name in lower case.
var domainSyntax = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)

// ParseDomain checks the domain of the host names of ports, which may be empty.
func ParseDomain(s string) (string, error) {
	s = strings.ToLower(s)
	if s != "" && (len(s) > 200 || !domainSyntax.MatchString(s)) {
		return "", sandbox.Invalid("domain", "%q is not a DNS name such as sandboxes.example.com", server.Trimmed(s))
	}
	return s, nil
}

// portOperation is the operation of all requests to ports.
const portOperation access.Operation = "usePort"

// about returns the target of the request, as far as the request names it.
func (to *portTarget) about() target {
	t := target{Target: server.Target{Operation: portOperation, Kind: sandbox.KindSandbox, Namespace: to.namespace, Name: to.name}}
	name := to.name
	if to.id != "" {
		name = string(to.id)
	}
	t.object = "sandboxes/" + name + "/ports/" + strconv.Itoa(int(to.port))
	return t
}

// authorisePort is Authorise for a port, whose sandbox may be named by its id. A
// principal that may not use the sandbox learns neither that it exists nor its
// name.
func (a *api) authorisePort(ctx context.Context, p access.Principal, to *portTarget, about *target) error {
	if to.id == "" || !p.May(about.Operation.Rule().Need) {
		return a.Authorise(ctx, p, about.Target)
	}
	unknown := sandbox.Errorf(sandbox.CodeNotFound, "there is no sandbox with the id %q", server.Trimmed(string(to.id)))
	k, err := to.key(ctx, a.Service)
	if err != nil {
		return unknown
	}
	named := *about
	named.Namespace, named.Name = string(k.Namespace), string(k.Name)
	if err := a.Authorise(ctx, p, named.Target); err != nil {
		return unknown
	}
	*about = named
	return nil
}

// key names the sandbox.
func (to *portTarget) key(ctx context.Context, s server.Service) (sandbox.Key, error) {
	if to.id == "" {
		return sandbox.ParseKey(to.namespace, to.name)
	}
	found, err := s.SandboxByID(ctx, to.id)
	return found.Key, err
}

// credentials returns the request with its token in the Authorization header. A
// request that is for no port is returned unchanged.
func (to *portTarget) credentials(r *http.Request) *http.Request {
	token := r.Header.Get(accessHeader)
	if to == nil || token == "" || r.Header.Get("Authorization") != "" {
		return r
	}
	with := r.WithContext(r.Context())
	with.Header = r.Header.Clone()
	with.Header.Set("Authorization", "Bearer "+token)
	return with
}

// url returns the URL for the program, with the path and the query as the
// client wrote them.
func (to *portTarget) url(in *url.URL) (*url.URL, error) {
	out := &url.URL{Scheme: "http", Host: to.authority(), RawQuery: in.RawQuery, ForceQuery: in.ForceQuery}
	raw := to.path
	if raw == "" {
		raw = "/"
	}
	path, err := url.PathUnescape(raw)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the path of the URL is not valid").Because("%s", server.Trimmed(err.Error()))
	}
	out.Path, out.RawPath = path, raw
	if out.EscapedPath() != raw {
		// The path has characters that URLs do not have, and would be sent with
		// escapes.
		if strings.HasPrefix(raw, "//") {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the path of the URL is not valid").
				Because("it begins with // and has characters that URLs do not have").Try("Write them with escapes")
		}
		out.Opaque = raw
	}
	return out, nil
}

// authority is the host and port that the program knows as its own.
func (to *portTarget) authority() string { return "localhost:" + strconv.Itoa(int(to.port)) }

// withoutDaemonCookies drops the daemon's own cookies; the others stay as they
// are.
func withoutDaemonCookies(h http.Header) {
	var kept []string
	for _, line := range h["Cookie"] {
		var pairs []string
		for pair := range strings.SplitSeq(line, ";") {
			if !strings.HasPrefix(strings.TrimSpace(pair), cookiePrefix) {
				pairs = append(pairs, pair)
			}
		}
		if text := strings.TrimSpace(strings.Join(pairs, ";")); text != "" {
			kept = append(kept, text)
		}
	}
	if h.Del("Cookie"); len(kept) > 0 {
		h["Cookie"] = kept
	}
}
