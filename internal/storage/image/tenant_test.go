package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// bait is a server at a closed address that is not in the settings. It counts the
// requests that reach it.
type bait struct {
	host  string
	comes atomic.Int32
}

func newBait(t *testing.T, tls bool) *bait {
	t.Helper()
	b := &bait{}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"token": "t"}`) }))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			b.comes.Add(1)
		}
	}
	if tls {
		server.StartTLS()
	} else {
		server.Start()
	}
	t.Cleanup(server.Close)
	b.host = server.Listener.Addr().String()
	return b
}

func (b *bait) port() string { _, port, _ := net.SplitHostPort(b.host); return port }

// wantUnreachable checks that a tenant learns nothing of why, and an admin does.
func wantUnreachable(t *testing.T, what, registry string, err error, cause string) {
	t.Helper()
	var u *Unreachable
	var hides interface{ ForAdmins() string }
	if !errors.As(err, &u) || !errors.As(err, &hides) {
		t.Errorf("%s: %v", what, err)
		return
	}
	want := "the registry " + registry + ", or a server that it leads to, cannot be reached or may not be: ask an administrator of the node, who can see the cause"
	if _, text, _ := strings.Cut(err.Error(), ": the registry"); "the registry"+text != want {
		t.Errorf("%s: the tenant reads %q", what, err)
	}
	if !strings.Contains(hides.ForAdmins(), cause) {
		t.Errorf("%s: the admin reads %q, which does not say %q", what, hides.ForAdmins(), cause)
	}
}

// TestClosedRegistries: a tenant's registry must be at a public address, in any form of
// that address. No request is sent to others.
func TestClosedRegistries(t *testing.T) {
	s, secure, plain := newStore(t), newBait(t, true), newBait(t, false)
	for host, cause := range map[string]string{
		secure.host: "loopback", plain.host: "loopback", "localhost:" + secure.port(): "loopback", "127.1.2.3:" + secure.port(): "loopback",
		"0.0.0.0:" + secure.port(): "unspecified", "[::]:" + secure.port(): "unspecified", "[::1]:" + secure.port(): "loopback",
		"[::ffff:127.0.0.1]:" + secure.port(): "loopback", "[::ffff:7f00:1]:" + secure.port(): "loopback",
		"[64:ff9b::7f00:1]:" + secure.port(): "loopback", "[2002:7f00:1::]:" + secure.port(): "loopback",
		"169.254.169.254": "metadata", "[::ffff:169.254.169.254]": "metadata", "[fd00:ec2::254]:443": "metadata", "168.63.129.16": "wire server",
		"10.0.0.1:5000": "private", "192.168.1.1": "private", "[fd12::1]:443": "private", "100.64.0.1": "carrier", "169.254.1.1": "link-local", "[fe80::1]:443": "link-local",
		"93.184.216.34": "an address of the host", "224.0.0.1": "multicast", "255.255.255.255": "reserved",
	} {
		for _, tenant := range []*Tenant{tenantOf("a", ""), tenantOf("a", "user")} {
			ref, err := ParseReference(host + "/team/app:1")
			if err != nil {
				t.Fatal(err)
			}
			_, err = s.Pull(t.Context(), ref, PullOptions{Tenant: tenant})
			wantUnreachable(t, host, ref.Registry(), err, cause)
		}
	}
	if n := secure.comes.Load() + plain.comes.Load(); n != 0 {
		t.Errorf("%d connections were made", n)
	}
	if _, err := s.Pull(t.Context(), mustRef(t, "example.com/app"), PullOptions{Tenant: &Tenant{Namespace: "a"}}); err == nil {
		t.Error("pulled without a guard")
	}
}

// TestWhereRegistriesLead: a named registry leads to no closed address that is not named, by
// redirects or by the realm of its tokens, and not with the credentials for it to another site.
func TestWhereRegistriesLead(t *testing.T) {
	r, s, secure, plain := newRegistry(t, withTLS), newStore(t), newBait(t, true), newBait(t, false)
	ref := r.push(t, "team/app:1", small(t, "one"))
	redirect := func(to string, parts ...string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, req *http.Request) bool {
			for _, part := range parts {
				if strings.Contains(req.URL.Path, part) {
					http.Redirect(w, req, to, http.StatusTemporaryRedirect)
					return true
				}
			}
			return false
		}
	}
	realm := func(to string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm=%q,service="s"`, to))
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
	}
	for _, to := range []string{
		"https://" + secure.host + "/x", "https://localhost:" + secure.port() + "/x", "https://[::ffff:127.0.0.1]:" + secure.port() + "/x",
		"https://[::ffff:7f00:1]:" + secure.port() + "/x", "https://0.0.0.0:" + secure.port() + "/x", "https://user:password@localhost:" + secure.port() + "/x",
		"http://" + plain.host + "/x", "http://localhost:" + plain.port() + "/x",
		"http://169.254.169.254/latest/meta-data", "https://169.254.169.254/latest/meta-data", "https://10.0.0.1/x", "https://[fd00:ec2::254]/x",
		"https://93.184.216.34/x", "gopher://127.0.0.1/x", "file:///etc/passwd",
	} {
		for what, lead := range map[string]func(http.ResponseWriter, *http.Request) bool{
			"the first answer": redirect(to, "/v2/"), "a manifest": redirect(to, "/manifests/"), "a blob": redirect(to, "/blobs/"), "the realm": realm(to),
		} {
			for _, user := range []string{"", "alice"} {
				r.set(lead)
				img, err := s.Pull(t.Context(), ref, r.tenant(t, "a", user))
				if err == nil {
					t.Errorf("%s that leads to %s gave %s", what, to, img.Digest)
				}
			}
		}
	}
	if n := secure.comes.Load() + plain.comes.Load(); n != 0 {
		t.Errorf("%d connections were made", n)
	}
	wantTidy(t, s)
}

// TestCredentialsOfTenants: they are sent to their registry, and not to where it leads to,
// named or not.
func TestCredentialsOfTenants(t *testing.T) {
	r, other, s := newRegistry(t, withTLS), newRegistry(t, withTLS), newStore(t)
	img := small(t, "one")
	ref := r.push(t, "team/app:1", img)
	other.push(t, "team/app:1", img)
	r.wantUser("alice")
	var mu sync.Mutex
	var told []string
	other.set(func(_ http.ResponseWriter, req *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, req.Header.Get("Authorization"))
		return false
	})
	r.set(func(w http.ResponseWriter, req *http.Request) bool {
		if strings.Contains(req.URL.Path, "/blobs/") || strings.Contains(req.URL.Path, "/manifests/") {
			http.Redirect(w, req, "https://"+other.host+req.URL.Path, http.StatusTemporaryRedirect)
			return true
		}
		return false
	})
	o := r.tenant(t, "a", "alice")
	o.Registries.Hosts[other.host] = Registry{CAFile: other.caFile(t)}
	if _, err := s.Pull(t.Context(), ref, o); err != nil {
		t.Fatalf("from where a named registry leads to, which is named as well: %v", err)
	}
	for _, header := range told {
		if header != "" {
			t.Errorf("the other host was told %q", header)
		}
	}
	if len(told) == 0 {
		t.Error("nothing was asked of it")
	}
	for a, want := range map[[2]string]bool{
		{"index.docker.io", "auth.docker.io"}: true, {"registry.gitlab.com", "gitlab.com"}: true, {"ghcr.io", "ghcr.io"}: true,
		{"registry.example.com:5000", "auth.example.com"}: true, {"a.github.io", "b.github.io"}: false, {"a.co.uk", "b.co.uk"}: false,
		{"registry.example.com", "example.org"}: false, {"1.2.3.4", "1.2.3.5"}: false, {"1.2.3.4:1", "1.2.3.4:2"}: false, {"localhost:1", "localhost:2"}: false,
	} {
		if got := sameSite(a[0], a[1]); got != want {
			t.Errorf("%v are of one site: %v", a, got)
		}
	}
}

// TestCredentialsOfNode: those of docker's configuration serve the namespaces that the
// settings list, and no others.
func TestCredentialsOfNode(t *testing.T) {
	r := newRegistry(t, withTLS)
	ref := r.push(t, "team/app:1", small(t, "one"))
	r.wantUser("node")
	dockerConfig(t, r.host, "node", "secret")
	for _, c := range []struct {
		serves    []string
		namespace string
		works     bool
	}{{nil, "a", false}, {[]string{"a"}, "a", true}, {[]string{"a"}, "b", false}, {[]string{"*"}, "b", true}} {
		s, o := newStore(t), r.tenant(t, c.namespace, "")
		named := o.Registries.Hosts[r.host]
		named.Namespaces = c.serves
		o.Registries.Hosts[r.host] = named
		if _, err := s.Pull(t.Context(), ref, o); (err == nil) != c.works {
			t.Errorf("%s, served are %v: %v", c.namespace, c.serves, err)
		}
	}
	// The namespace's own go before.
	o := r.tenant(t, "a", "somebody")
	named := o.Registries.Hosts[r.host]
	named.Namespaces = []string{"*"}
	o.Registries.Hosts[r.host] = named
	if _, err := newStore(t).Pull(t.Context(), ref, o); err == nil || !strings.Contains(err.Error(), "answers 401") {
		t.Errorf("wrong credentials of the namespace: %v", err)
	}
}

// TestAllowList: with a list of registries, namespaces name no others.
func TestAllowList(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	ref := r.push(t, "team/app:1", small(t, "one"))
	for _, allow := range [][]string{{}, {"example.com"}} {
		o := r.tenant(t, "a", "")
		o.Registries.Allow = allow
		if _, err := s.Pull(t.Context(), ref, o); err == nil || !strings.Contains(err.Error(), "namespaces may not pull from "+r.host) {
			t.Errorf("allowed are %v: %v", allow, err)
		}
	}
	o := r.tenant(t, "a", "")
	o.Registries.Allow = []string{r.host}
	if _, err := s.Pull(t.Context(), ref, o); err != nil {
		t.Error(err)
	}
}

// TestTenantErrors: why a registry gives no answer is not to be told from the error.
func TestTenantErrors(t *testing.T) {
	tls, plain, s := newRegistry(t, withTLS), newRegistry(t, plainHTTP), newStore(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for host, cause := range map[string]string{
		dead: "connection refused", tls.host: "certificate", plain.host: "TLS handshake", "10.9.8.7": "private",
		"no-such-name.invalid": "no-such-name.invalid",
	} {
		o := PullOptions{Registries: Registries{Hosts: map[string]Registry{tls.host: {}, plain.host: {}, dead: {}}}, Tenant: tenantOf("a", "")}
		_, err := s.Pull(t.Context(), mustRef(t, host+"/app:1"), o)
		wantUnreachable(t, host, host, err, cause)
	}
	tls.set(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"errors": [{"code": "DENIED", "message": "not`+"\\u001b[31m"+` you"}]}`)
		return true
	})
	_, err = s.Pull(t.Context(), mustRef(t, tls.host+"/app:1"), tls.tenant(t, "a", ""))
	if err == nil || !strings.Contains(err.Error(), "answers 403 Forbidden; DENIED: not [31m you") {
		t.Errorf("an answer: %q", err)
	}
}

// TestEndlessAnswers: whatever a registry answers with, it is read up to a bound.
func TestEndlessAnswers(t *testing.T) {
	r, s := newRegistry(t, plainHTTP), newStore(t)
	ref := r.push(t, "team/app:1", small(t, "one"))
	endless := func(code int, path, realm string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, req *http.Request) bool {
			if realm != "" && !strings.Contains(req.URL.Path, path) {
				w.Header().Set("WWW-Authenticate", `Bearer realm="`+realm+`"`)
				w.WriteHeader(http.StatusUnauthorized)
				return true
			}
			if !strings.Contains(req.URL.Path, path) {
				return false
			}
			w.WriteHeader(code)
			for chunk := []byte(strings.Repeat("x", 64<<10)); ; {
				if _, err := w.Write(chunk); err != nil {
					return true // the other side has had enough
				}
			}
		}
	}
	for what, answer := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"the first answer": endless(200, "/v2/", ""), "an error": endless(404, "/manifests/", ""), "a first error": endless(500, "/v2/", ""), "a manifest": endless(200, "/manifests/", ""),
		"a blob": endless(200, "/blobs/", ""), "an error for a blob": endless(403, "/blobs/", ""),
		"a token": endless(200, "/token", "http://"+r.host+"/token"), "an error for a token": endless(401, "/token", "http://"+r.host+"/token"),
	} {
		r.set(answer)
		if img, err := s.Pull(t.Context(), ref, r.tenant(t, "a", "")); err == nil {
			t.Errorf("%s without an end gave %s", what, img.Digest)
		} else if len(err.Error()) > 2*maxText {
			t.Errorf("%s: an error of %d bytes", what, len(err.Error()))
		}
	}
	wantTidy(t, s)
}

// nameServer is a DNS server whose answers change from question to question.
func nameServer(t *testing.T, answers ...[4]byte) *net.Resolver {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	go func() {
		b, asked := make([]byte, 4096), 0
		for {
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(b[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			q := m.Questions[0]
			m.Response, m.Additionals = true, nil
			if q.Type == dnsmessage.TypeA {
				a := answers[min(asked, len(answers)-1)]
				asked++
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 0}, Body: &dnsmessage.AResource{A: a},
				}}
			}
			if out, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(out, from)
			}
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
}

// TestRebinding: a name that leads to an open address at first, and to a closed one later,
// is followed to the first alone: each connection is checked, and not the name.
func TestRebinding(t *testing.T) {
	r, s := newRegistry(t, plainHTTP), newStore(t)
	r.push(t, "team/app:1", small(t, "one"))
	_, port, err := net.SplitHostPort(r.host)
	if err != nil {
		t.Fatal(err)
	}
	var comes atomic.Int32
	elsewhere, err := net.Listen("tcp", "127.0.0.2:"+port)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ConnState: func(net.Conn, http.ConnState) { comes.Add(1) }, ErrorLog: log.New(io.Discard, "", 0)}
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(elsewhere) }()
	t.Cleanup(func() { _ = server.Close(); <-served })
	r.set(func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Connection", "close") // the next request connects again
		return false
	})
	host := "registry.test:" + port
	o := PullOptions{
		Registries: Registries{Hosts: map[string]Registry{host: {PlainHTTP: true, Addresses: []string{"127.0.0.1"}}}},
		Tenant:     tenantOf("a", ""),
	}
	o.Tenant.resolver = nameServer(t, [4]byte{127, 0, 0, 1}, [4]byte{127, 0, 0, 2})
	_, err = s.Pull(t.Context(), mustRef(t, host+"/team/app:1"), o)
	wantUnreachable(t, "the second address", host, err, "127.0.0.2 is closed")
	if n := comes.Load(); n != 0 {
		t.Errorf("%d connections were made", n)
	}
	// With one address throughout it works: the other address was refused.
	o.Tenant.resolver = nameServer(t, [4]byte{127, 0, 0, 1})
	if _, err := s.Pull(t.Context(), mustRef(t, host+"/team/app:1"), o); err != nil {
		t.Error(err)
	}
	// A registry that is not in the settings may not reach closed addresses, not even
	// those in the settings.
	o.Tenant.resolver = nameServer(t, [4]byte{127, 0, 0, 1})
	_, err = s.Pull(t.Context(), mustRef(t, "other.test:"+port+"/team/app:1"), o)
	wantUnreachable(t, "another name", "other.test:"+port, err, "127.0.0.1 is closed")
}
