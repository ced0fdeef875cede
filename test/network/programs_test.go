package network

import (
	"maps"
	"net/http"
	"slices"
	"sync"
	"testing"

	"agentrun.dev/test/network/world"
	"github.com/coder/websocket"
)

// echo sends each message of a WebSocket back.
var echo = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return // Accept has answered already
	}
	defer func() { _ = c.CloseNow() }()
	for {
		kind, message, err := c.Read(r.Context())
		if err != nil || c.Write(r.Context(), kind, message) != nil {
			return
		}
	}
})

// speakWebSocket sends a message over a WebSocket (RFC 6455) and prints the answer.
const speakWebSocket = `
import base64, os, socket, ssl, struct, sys
host, port = sys.argv[1], int(sys.argv[2])
s = socket.create_connection((host, port), timeout=60)
if port == 443:
    s = ssl.create_default_context().wrap_socket(s, server_hostname=host)
s.sendall(("GET /echo HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
           "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n" % (host, base64.b64encode(os.urandom(16)).decode())).encode())
f = s.makefile("rb")
print(f.readline().decode().strip())
while f.readline().strip():
    pass
message, mask = b"over and over" * 9, os.urandom(4)
masked = bytes(b ^ mask[i % 4] for i, b in enumerate(message))
for _ in range(3):
    s.sendall(struct.pack("!BB", 0x81, 0x80 | len(message)) + mask + masked)
    _, size = f.read(2)
    assert f.read(size) == message
print("echoed")
`

// keepAlive makes many requests over one connection.
const keepAlive = `
import http.client, sys
c = http.client.HTTPSConnection(sys.argv[1], timeout=60)
c.connect()
port = c.sock.getsockname()[1]
for i in range(50):
    c.request("POST", "/%d" % i, body=b"x" * i)
    assert c.getresponse().read().startswith(b"hello from"), i
    assert c.sock.getsockname()[1] == port, "another connection"
print("kept alive")
`

// keepAliveByRequests does so with Python's requests, over one session.
const keepAliveByRequests = `
import requests, sys
with requests.Session() as s:
    for i in range(50):
        r = s.post("https://%s/%d" % (sys.argv[1], i), data=b"x" * i, timeout=60)
        assert r.status_code == 200 and r.text.startswith("hello from"), (i, r.status_code, r.text)
print("kept alive by", requests.__name__, requests.__version__)
`

// clients counts the requests to a server by client.
type clients struct {
	mu    sync.Mutex
	asked map[string]int
}

func (c *clients) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	c.asked[r.RemoteAddr]++
	c.mu.Unlock()
	hello(w, r)
}

// TestPrograms: programs that AI agents use work within their policy.
func TestPrograms(t *testing.T) {
	s := newSite(t)
	s.importImage(t, "demo:1", "programs.sh")
	s.serveProjects(t)
	s.pool(t, "demo", 1, `networkPolicy:
    egress: deny
    allow:
      - index.example.org:443
      - files.example.org:443
      - git.example.org:443
      - deb.example.org:80
      - www.example.org:443
      - api.example.org:443
      - "*.six.example.org"
      - chat.example.org`)
	s.claim(t, "demo", "a")
	for _, c := range []struct{ name, script, want string }{
		{"pip", "pip install -q --no-cache-dir --index-url https://index.example.org/simple/ tool && python3 -c 'import tool; print(tool.__version__)'", "1.2.3"},
		{"git", "cd /tmp && git clone -q https://git.example.org/project.git && cat project/README", "cloned"},
		{"apt-get", "echo 'deb [trusted=yes] http://deb.example.org/debian stable main' >/etc/apt/sources.list && cd /tmp && apt-get -q update && apt-get -q download thing && cat thing_1_all.deb", "a package"},
		{"curl", "curl -sS --http2 https://www.example.org/ https://www.example.org/again && curl -sS -o /dev/null -w '%{http_version}' https://www.example.org/", "by HTTP/2.0"},
		{"IPv6 only", "curl -sS -6 http://v6.six.example.org/ && curl -sS https://v6.six.example.org/", "hello from v6.six.example.org by HTTP/2.0"},
	} {
		t.Run(c.name, func(t *testing.T) { s.prints(t, "a", c.want, "sh", "-c", c.script) })
	}
	t.Run("keep-alive", func(t *testing.T) { s.prints(t, "a", "kept alive", "python3", "-c", keepAlive, "www.example.org") })
	t.Run("keep-alive by requests", func(t *testing.T) {
		seen := &clients{asked: map[string]int{}}
		s.Name("api.example.org", 60, "25.1.113.27")
		s.ServeHTTPS(t, "25.1.113.27:443", seen, "api.example.org")
		s.prints(t, "a", "kept alive by requests", "python3", "-c", keepAliveByRequests, "api.example.org")
		seen.mu.Lock()
		defer seen.mu.Unlock()
		if len(seen.asked) != 1 || slices.Collect(maps.Values(seen.asked))[0] != 50 {
			t.Errorf("the server has got these requests by connection: %v; want 50 over one", seen.asked)
		}
	})
	for _, port := range []string{"80", "443"} {
		t.Run("WebSocket on port "+port, func(t *testing.T) {
			s.prints(t, "a", "HTTP/1.1 101 Switching Protocols\nechoed", "python3", "-c", speakWebSocket, "chat.example.org", port)
		})
	}
}

// serveProjects serves the files that the programs fetch.
func (s *site) serveProjects(t *testing.T) {
	t.Helper()
	index, files := world.PythonIndex(t, "https://files.example.org", world.Wheel{Name: "tool", Version: "1.2.3"})
	s.Name("index.example.org", 60, "25.1.113.20")
	s.ServeHTTPS(t, "25.1.113.20:443", index, "index.example.org")
	s.Alias("files.example.org", "cdn.example.net", 60)
	s.Name("cdn.example.net", 60, "25.1.113.21")
	s.ServeHTTPS(t, "25.1.113.21:443", files, "files.example.org")
	s.Name("git.example.org", 60, "25.1.113.22")
	s.ServeHTTPS(t, "25.1.113.22:443", world.GitServer(t, "README", "cloned\n"), "git.example.org")
	s.Name("deb.example.org", 60, "25.1.113.23")
	s.ServeHTTP(t, "25.1.113.23:80", world.DebianMirror("thing", "a package\n"))
	s.Name("www.example.org", 60, "25.1.113.24")
	s.ServeHTTPS(t, "25.1.113.24:443", hello, "www.example.org")
	s.Name("v6.six.example.org", 60, "2600:db8:5::25")
	s.ServeHTTP(t, "[2600:db8:5::25]:80", hello)
	s.ServeHTTPS(t, "[2600:db8:5::25]:443", hello, "v6.six.example.org")
	s.Name("chat.example.org", 60, "25.1.113.26")
	s.ServeHTTP(t, "25.1.113.26:80", echo)
	s.ServeHTTPS(t, "25.1.113.26:443", echo, "chat.example.org")
}

// TestPublished: the published template builds, including the packages of its
// init command. Its sandboxes reach the two names that it allows.
func TestPublished(t *testing.T) {
	s := newSite(t)
	s.importImage(t, "python:3.12-slim", "programs.sh")
	index, files := world.PythonIndex(t, "https://files.pythonhosted.org",
		world.Wheel{Name: "numpy", Version: "2.1.0"}, world.Wheel{Name: "pandas", Version: "2.2.3"}, world.Wheel{Name: "requests", Version: "2.32.3"})
	s.Name("pypi.org", 60, "25.1.113.30", "2600:db8:5::30")
	s.ServeHTTPS(t, "25.1.113.30:443", index, "pypi.org")
	s.ServeHTTPS(t, "[2600:db8:5::30]:443", index, "pypi.org")
	s.Name("files.pythonhosted.org", 60, "25.1.113.31")
	s.ServeHTTPS(t, "25.1.113.31:443", files, "files.pythonhosted.org")
	s.Name("api.openai.com", 60, "25.1.113.32")
	s.ServeHTTPS(t, "25.1.113.32:443", hello, "api.openai.com")
	s.Name("api.anthropic.com", 60, "25.1.113.33")
	s.ServeHTTPS(t, "25.1.113.33:443", hello, "api.anthropic.com")
	s.apply(t, `
apiVersion: agentrun.dev/v1alpha1
kind: SandboxTemplate
metadata:
  name: python-agent
spec:
  image: python:3.12-slim
  init: ["pip install numpy pandas requests"]
  resources:
    cpu: "1"
    memory: 256Mi
  warmup:
    code: import numpy, pandas, requests
  networkPolicy:
    egress: deny
    allow: ["api.openai.com:443", "api.anthropic.com:443"]
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxPool
metadata:
  name: python-agent-pool
spec:
  templateRef:
    name: python-agent
  replicas: 2
`)
	s.claim(t, "python-agent-pool", "agent-session-1")
	if out := s.must(t, "code", "agent-session-1", "[m.__version__ for m in (numpy, pandas, requests)]"); out != "['2.1.0', '2.2.3', '2.32.3']\n" {
		t.Errorf("the warm modules: %s", out)
	}
	for url, want := range map[string]string{
		"https://api.openai.com/v1":    "hello from api.openai.com",
		"https://api.anthropic.com/v1": "hello from api.anthropic.com",
		"https://pypi.org/simple/":     "failed: <urlopen error [Errno -", // the build may reach it, but not the sandboxes
		"http://api.openai.com/":       "Connection refused",
	} {
		s.prints(t, "agent-session-1", want, "python3", "-c", get, url)
	}
}
