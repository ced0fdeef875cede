package forkd

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"agentrun.dev/api/rest"
)

// portsDomain is a domain that no resolver knows. The tests' clients connect to
// the daemon's address instead.
const portsDomain = "sandboxes.test"

// front is the TCP address of a daemon, with its token.
type front struct {
	t       *testing.T
	address string
	token   string
	client  *http.Client
}

// newFront asks the daemon where it listens.
func newFront(n *node) *front {
	n.t.Helper()
	v, err := n.Client.Version(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	f := &front{t: n.t, address: v.Endpoint, token: n.key("admin")}
	f.client = &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 32,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", f.address)
		},
	}}
	n.t.Cleanup(f.client.CloseIdleConnections)
	return f
}

func (f *front) do(method, url string, body io.Reader, headers ...string) *http.Response {
	f.t.Helper()
	r, err := http.NewRequestWithContext(f.t.Context(), method, url, body)
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("X-Access-Token", f.token)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	res, err := f.client.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	return res
}

// echo is the answer of the server in a sandbox: it describes the request.
type echo struct {
	Name    string
	Path    string
	Headers [][2]string
}

func (f *front) echo(url string, headers ...string) (e echo) {
	f.t.Helper()
	res := f.do("GET", url, nil, headers...)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK || json.Unmarshal(body, &e) != nil {
		f.t.Fatalf("%s: %d %s %v", url, res.StatusCode, body, err)
	}
	return e
}

// serveInside starts the test's server in a sandbox and waits until it answers.
func (n *node) serveInside(f *front, name string, port int) (path, host string) {
	n.t.Helper()
	ctx := n.t.Context()
	s, err := n.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: "pool"}, "")
	if err != nil {
		n.t.Fatal(err)
	}
	source, err := os.Open(filepath.Join("testdata", "ports", "server.py"))
	if err != nil {
		n.t.Fatal(err)
	}
	defer source.Close()
	if _, err := n.Client.WriteFile(ctx, name, "/tmp/server.py", "", source); err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.Client.Start(ctx, name, rest.ExecRequest{Argv: []string{"python3", "/tmp/server.py", fmt.Sprint(port), name}}); err != nil {
		n.t.Fatal(err)
	}
	path = fmt.Sprintf("http://daemon/v1/namespaces/default/sandboxes/%s/ports/%d", name, port)
	for {
		res := f.do("GET", path+"/", nil)
		body, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if res.StatusCode == http.StatusOK {
			return path, fmt.Sprintf("http://%d-%s.%s", port, s.Id, portsDomain)
		}
		if !strings.Contains(string(body), "port_closed") {
			n.t.Fatalf("%d %s", res.StatusCode, body)
		}
		time.Sleep(20 * time.Millisecond) // there is no event to wait for
	}
}

// TestPorts: clients reach programs in real sandboxes over the daemon's TCP
// address.
func TestPorts(t *testing.T) {
	n := newNode(t)
	n.up("--listen", "127.0.0.1:0", "--insecure-http", "--domain", portsDomain, "--metrics-listen", "127.0.0.1:0", "--log-format", "text")
	defer n.down()
	n.template(pythonImage(t))
	f := newFront(n)
	const port = 8000
	path, host := n.serveInside(f, "one", port)
	otherPath, otherHost := n.serveInside(f, "two", port)
	defer func() {
		for _, name := range []string{"one", "two"} {
			if _, err := n.Client.Kill(context.Background(), name); err != nil {
				t.Error(err)
			}
		}
	}()

	t.Run("Names", func(t *testing.T) {
		for base, name := range map[string]string{path: "one", host: "one", otherPath: "two", otherHost: "two"} {
			if e := f.echo(base + "/a/b%2Fc?d=e%20f"); e.Name != name || e.Path != "/a/b%2Fc?d=e%20f" {
				t.Errorf("%s: %+v", base, e)
			}
		}
		// Another port belongs to another program; here no program listens on
		// it.
		res := f.do("GET", strings.Replace(host, "8000-", "8001-", 1)+"/", nil)
		body, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if res.StatusCode != http.StatusBadGateway || !strings.Contains(string(body), "port_closed") {
			t.Errorf("%d %s", res.StatusCode, body)
		}
	})
	t.Run("Traversal", func(t *testing.T) { f.traversal(path, host) })
	t.Run("Secrets", func(t *testing.T) {
		for _, base := range []string{path, host} {
			e := f.echo(base+"/", "Cookie", "mine=1; agentrun_x=secret", "Connection", "X-Hop", "X-Hop", "1", "Proxy-Authorization", "Basic secret")
			text := fmt.Sprint(e.Headers)
			if strings.Contains(text, f.token) || strings.Contains(text, "secret") || strings.Contains(text, "X-Hop") || !strings.Contains(text, "mine=1") {
				t.Errorf("the program got %s", text)
			}
		}
		for _, token := range []string{"wrong", ""} {
			for _, base := range []string{path, host} {
				res := f.do("GET", base+"/", nil, "X-Access-Token", token)
				_ = res.Body.Close()
				if res.StatusCode != http.StatusUnauthorized {
					t.Errorf("with the token %q: %d", token, res.StatusCode)
				}
			}
		}
	})
	t.Run("Bodies", func(t *testing.T) { f.bodies(t, path, otherHost) })
	t.Run("Events", func(t *testing.T) {
		res := f.do("GET", host+"/events", nil)
		defer res.Body.Close()
		if got, err := io.ReadAll(res.Body); err != nil || string(got) != "data: 0\n\ndata: 1\n\ndata: 2\n\n" {
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("WebSocket", func(t *testing.T) { f.webSockets(t, path, host) })
	t.Run("Hibernated", func(t *testing.T) {
		if _, err := n.Client.Do(t.Context(), "two", "hibernate"); err != nil {
			t.Fatal(err)
		}
		if e := f.echo(otherHost + "/"); e.Name != "two" { // its server continued
			t.Errorf("%+v", e)
		}
	})
	t.Run("Forked", func(t *testing.T) { n.forkedPorts(t, f, port) })
	t.Run("PortForward", func(t *testing.T) { n.portForward(t, port) })
	t.Run("Terminal", func(t *testing.T) { f.terminal(t) })
	t.Run("Metrics", func(t *testing.T) { n.scraped(t, f) })
}

// traversal: the daemon passes the path after the port to the program
// unchanged.
func (f *front) traversal(path, host string) {
	for _, evil := range []string{"/../../../../../v1/version", "/%2e%2e/%2e%2e/x", "/..%2f..", "/x//y", "/a/./b"} {
		for _, first := range []string{strings.TrimPrefix(path, "http://daemon") + evil, evil} {
			conn, err := net.Dial("tcp", f.address)
			if err != nil {
				f.t.Fatal(err)
			}
			_, err = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nX-Access-Token: %s\r\nConnection: close\r\n\r\n", first, strings.TrimPrefix(host, "http://"), f.token)
			if err != nil {
				f.t.Fatal(err)
			}
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				f.t.Fatal(err)
			}
			var e echo
			err = json.NewDecoder(res.Body).Decode(&e)
			// With a host name, the whole path is the program's.
			want := first
			if err != nil || e.Name != "one" || e.Path != want {
				f.t.Errorf("%s became %d %+v %v", first, res.StatusCode, e, err)
			}
			_ = conn.Close()
		}
	}
}

// bodies: large bodies arrive complete in both directions, several at a time.
func (f *front) bodies(t *testing.T, bases ...string) {
	const size = 16 << 20
	sent := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	sum := sha256.Sum256(sent)
	var all sync.WaitGroup
	for i := range 6 {
		base := bases[i%len(bases)]
		all.Go(func() {
			body := io.Reader(bytes.NewReader(sent))
			if i%3 == 0 {
				body = io.MultiReader(body) // of unknown length: sent in chunks
			}
			res := f.do("POST", base+"/", body)
			var got struct {
				Size   int
				SHA256 string
			}
			err := json.NewDecoder(res.Body).Decode(&got)
			_ = res.Body.Close()
			if err != nil || got.Size != size || got.SHA256 != hex.EncodeToString(sum[:]) {
				t.Errorf("it got %+v, %v", got, err)
			}
			res = f.do("GET", fmt.Sprintf("%s/big/%d", base, size), nil)
			n, err := io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
			if err != nil || n != size {
				t.Errorf("%d of %d bytes, %v", n, size, err)
			}
		})
	}
	all.Wait()
}

func (f *front) webSockets(t *testing.T, bases ...string) {
	var all sync.WaitGroup
	for _, base := range bases {
		for range 5 {
			all.Go(func() {
				conn, _, err := websocket.Dial(t.Context(), base+"/ws", &websocket.DialOptions{
					HTTPClient: f.client, HTTPHeader: http.Header{"X-Access-Token": {f.token}},
				})
				if err != nil {
					t.Error(err)
					return
				}
				defer func() { _ = conn.CloseNow() }()
				conn.SetReadLimit(1 << 20)
				for _, size := range []int{0, 5, 125, 126, 70000} {
					sent := bytes.Repeat([]byte("z"), size)
					err := conn.Write(t.Context(), websocket.MessageBinary, sent)
					_, got, rerr := conn.Read(t.Context())
					if err != nil || rerr != nil || !bytes.Equal(got, sent) {
						t.Errorf("%d of %d bytes, %v, %v", len(got), size, err, rerr)
						return
					}
				}
				if err := conn.Close(websocket.StatusNormalClosure, ""); err != nil {
					t.Error(err)
				}
			})
		}
	}
	all.Wait()
}

// forkedPorts: a fork has its own server, separate from that of the source.
func (n *node) forkedPorts(t *testing.T, f *front, port int) {
	fork, err := n.Client.Fork(t.Context(), "one", rest.ForkCreate{Name: "copy", Replicas: 1}, "")
	if err != nil {
		t.Fatal(err)
	}
	child := fork.Children[0]
	defer func() {
		if _, err := n.Client.Kill(context.Background(), child.Name); err != nil {
			t.Error(err)
		}
	}()
	host := fmt.Sprintf("http://%d-%s.%s", port, child.Id, portsDomain)
	f.echo(host + "/")
	if _, err := n.Client.Run(t.Context(), child.Name, rest.ExecRequest{Shell: "kill $(pidof python3) || pkill python3"}); err != nil {
		t.Fatal(err)
	}
	for {
		res := f.do("GET", host+"/", nil)
		_ = res.Body.Close()
		if res.StatusCode == http.StatusBadGateway {
			break
		}
		time.Sleep(20 * time.Millisecond) // until the signal has arrived
	}
	if e := f.echo(fmt.Sprintf("http://daemon/v1/namespaces/default/sandboxes/one/ports/%d/", port)); e.Name != "one" {
		t.Errorf("%+v", e)
	}
}

// portForward runs agentrun port-forward as a user does.
func (n *node) portForward(t *testing.T, port int) {
	cmd := n.command("port-forward", "one", fmt.Sprintf(":%d", port), ":9")
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			t.Errorf("port-forward ended with %v", err)
		}
	}()
	lines := bufio.NewReader(said)
	where := func() string {
		line, err := lines.ReadString('\n')
		m := regexp.MustCompile(`^agentrun: (127\.0\.0\.1:\d+) is port \d+ of one\n$`).FindStringSubmatch(line)
		if err != nil || m == nil {
			t.Fatalf("it said %q, %v", line, err)
		}
		return m[1]
	}
	open, closed := where(), where()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			res, err := http.Get("http://" + open + "/big/3000000")
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			if n, err := io.Copy(io.Discard, res.Body); err != nil || n != 3000000 {
				t.Errorf("%d bytes, %v", n, err)
			}
		})
	}
	all.Wait()
	if res, err := http.Get("http://" + closed); err == nil {
		_ = res.Body.Close()
		t.Error("nobody answered")
	}
	if line, err := lines.ReadString('\n'); err != nil || !strings.Contains(line, "nothing listens on port 9 of sandbox one") {
		t.Errorf("it said %q, %v", line, err)
	}
}

// terminal requests a token and opens a terminal with it.
func (f *front) terminal(t *testing.T) {
	const at = "/v1/namespaces/default/sandboxes/one/terminal"
	res := f.do("POST", "http://daemon"+at, strings.NewReader(`{"argv": ["/bin/sh"]}`), "Content-Type", "application/json", "Authorization", "Bearer "+f.token)
	var ticket rest.Terminal
	err := json.NewDecoder(res.Body).Decode(&ticket)
	_ = res.Body.Close()
	if err != nil || res.StatusCode != http.StatusCreated {
		t.Fatalf("%d, %v", res.StatusCode, err)
	}
	conn, _, err := websocket.Dial(t.Context(), "http://daemon"+at+"?token="+ticket.Token, &websocket.DialOptions{HTTPClient: f.client})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseNow() }()
	if err := conn.Write(t.Context(), websocket.MessageBinary, []byte("echo $((6*7))-inside; exit 3\n")); err != nil {
		t.Fatal(err)
	}
	shown := ""
	for {
		kind, data, err := conn.Read(t.Context())
		if err != nil {
			t.Fatalf("after %q: %v", shown, err)
		}
		if kind == websocket.MessageText {
			if !strings.Contains(shown, "42-inside") || !strings.Contains(string(data), `"exitCode":3`) {
				t.Errorf("%q, %s", shown, data)
			}
			return
		}
		shown += string(data)
	}
}

// scraped: clients with the token get the metrics, and at the scraper's address
// all clients do. The metrics count the operations of this test.
func (n *node) scraped(t *testing.T, f *front) {
	res := f.do("GET", "http://daemon/metrics", nil)
	_ = res.Body.Close()
	if res.StatusCode != http.StatusUnauthorized {
		t.Errorf("without the token: %d", res.StatusCode)
	}
	var body []byte
	var err error
	// The terminal's client learns of its end before the daemon has cleaned up.
	for !bytes.Contains(body, []byte(`operation="terminal",pool="pool",result="ok"`)) {
		res = f.do("GET", "http://daemon/metrics", nil, "Authorization", "Bearer "+f.token)
		body, err = io.ReadAll(res.Body)
		_ = res.Body.Close()
		if err != nil || res.StatusCode != http.StatusOK {
			t.Fatalf("%d, %v", res.StatusCode, err)
		}
	}
	labels := `engine="[a-z]+",namespace="default",pool="pool"`
	for _, want := range []string{
		`agentrun_active_sandboxes\{` + labels + `\} 2\b`,
		`agentrun_pool_replicas\{` + labels + `\} 2\b`,
		`agentrun_pool_ready_snapshots\{` + labels + `\} \d`,
		`agentrun_memory_unique_bytes\{` + labels + `\} [1-9]`,
		`agentrun_fork_duration_seconds_count\{engine="[a-z]+",kind="live",namespace="default",pool="pool",result="ok"\} 1\b`,
		`agentrun_fork_duration_seconds_count\{engine="[a-z]+",kind="template",namespace="default",pool="pool",result="ok"\} [1-9]`,
		`agentrun_claim_duration_seconds_count\{engine="[a-z]+",namespace="default",pool="pool",result="ok",source="ready"\} [1-9]`,
		`agentrun_live_fork_pause_seconds_count\{` + labels + `\} 1\b`,
		`agentrun_sandbox_ends_total\{engine="[a-z]+",namespace="default",pool="pool",reason="killed"\} 1\b`,
		`agentrun_operations_total\{engine="[a-z]+",namespace="default",operation="port",pool="pool",result="ok"\} [1-9]`,
		`agentrun_operations_total\{engine="[a-z]+",namespace="default",operation="terminal",pool="pool",result="ok"\} 1\b`,
		`agentrun_http_request_errors_total\{code="port_closed",route="/v1/namespaces/\{namespace\}/sandboxes/\{name\}/ports/\{port\}/\{path...\}"\} [1-9]`,
		`agentrun_build_duration_seconds_count\{engine="[a-z]+",result="ok",stage="Ready"\} 1\b`,
	} {
		if !regexp.MustCompile(want).Match(body) {
			t.Errorf("there is no %s", want)
		}
	}
	if strings.Contains(string(body), `engine="gvisor"`) && !regexp.MustCompile(`agentrun_memory_shared_bytes\{`+labels+`\} 0\b`).Match(body) {
		t.Error("gVisor shares no memory")
	}
	if bytes.Contains(body, []byte(`"one"`)) {
		t.Error("a label names a sandbox")
	}
	address := regexp.MustCompile(`serving metrics on ([0-9.:]+)`).FindStringSubmatch(n.Log.String())
	if address == nil {
		t.Fatalf("the daemon said %s", n.Log.String())
	}
	res, err = http.Get("http://" + address[1] + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	other, err := http.Get("http://" + address[1] + "/v1/version")
	if err != nil {
		t.Fatal(err)
	}
	_ = other.Body.Close()
	if res.StatusCode != http.StatusOK || other.StatusCode != http.StatusNotFound {
		t.Errorf("at the scraper's address: metrics %d, version %d", res.StatusCode, other.StatusCode)
	}
}

// TestPortNamesOverTLS: the daemon's own certificate is valid for the host names
// of ports, and for no other names.
func TestPortNamesOverTLS(t *testing.T) {
	n := newNode(t)
	n.up("--listen", "127.0.0.1:0", "--domain", portsDomain)
	defer n.down()
	v, err := n.Client.Version(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	authority, err := os.ReadFile(filepath.Join(n.State, "forkd", "tls", "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	known := x509.NewCertPool()
	if !known.AppendCertsFromPEM(authority) {
		t.Fatal("the authority's file has no certificate")
	}
	for name, good := range map[string]bool{"8000-" + strings.Repeat("a", 20) + "." + portsDomain: true, portsDomain: true, "other.example": false} {
		d := tls.Dialer{Config: &tls.Config{RootCAs: known, ServerName: name, MinVersion: tls.VersionTLS12}}
		conn, err := d.DialContext(t.Context(), "tcp", v.Endpoint)
		if (err == nil) != good {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			_ = conn.Close()
		}
	}
}
