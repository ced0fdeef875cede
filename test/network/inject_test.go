package network

import (
	"bytes"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
)

// api plays the host that a secret is for. It records the keys in its requests.
type api struct {
	mu   sync.Mutex // protects keys
	keys []string   // "PROTOCOL Authorization"
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	a.keys = append(a.keys, r.Proto+" "+r.Header.Get("Authorization"))
	a.mu.Unlock()
	_, _ = io.WriteString(w, "hello from "+r.Host)
}

// shown returns the keys since the last call.
func (a *api) shown() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := a.keys
	a.keys = nil
	return out
}

// askWithKey makes a request as a program with a key does.
const askWithKey = `
import os, sys, urllib.request
r = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
try:
    print(urllib.request.urlopen(r, timeout=60).read().decode())
except OSError as e:
    print("failed:", e, getattr(e, "read", lambda: b"")().decode())
`

// keeps makes one request per line of its input, all on one connection, and prints the
// answers.
const keeps = `
import http.client, os, sys
c = http.client.HTTPSConnection("api.openai.com", timeout=60)
for line in sys.stdin:
    c.request("GET", "/", headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    print(c.getresponse().read().decode(), flush=True)
`

const (
	oldKey = "sk-old-canary-58164"
	newKey = "sk-new-canary-93027"
)

// TestInject: programs in a sandbox use an API with a key that they never see. The key
// follows changes of its secret, and survives forks, hibernation, and the death of daemon
// and netd.
func TestInject(t *testing.T) {
	s := newSite(t)
	s.importImage(t, "demo:1", "programs.sh")
	openai := &api{}
	s.Name("api.openai.com", 60, "25.1.113.60")
	s.ServeHTTPS(t, "25.1.113.60:443", openai, "api.openai.com")
	s.ServeHTTP(t, "25.1.113.60:80", openai)
	s.Name("bad.example.org", 60, "25.1.113.61")
	s.ServeHTTPS(t, "25.1.113.61:443", openai, "other.example.org")
	s.Name("www.example.org", 60, "25.1.113.62")
	s.ServeHTTPS(t, "25.1.113.62:443", openai, "www.example.org")
	s.must(t, "secret", "set", "llm", "OPENAI_API_KEY="+oldKey)
	s.pool(t, "demo", 1, "trustNamespaceCA: true\n  networkPolicy: {allow: [api.openai.com, bad.example.org, www.example.org]}")
	s.claim(t, "demo", "a", `secrets:
    - {name: llm, key: OPENAI_API_KEY, inject: {host: api.openai.com, header: Authorization, format: "Bearer {}"}}
    - {name: llm, key: OPENAI_API_KEY, env: BAD, inject: {host: bad.example.org, header: Authorization, format: "Bearer {}"}}`)
	// wants checks that a request of a sandbox reaches the API with a key.
	wants := func(t *testing.T, sandbox, key string) {
		t.Helper()
		openai.shown()
		s.prints(t, sandbox, "hello from api.openai.com", "python3", "-c", askWithKey, "https://api.openai.com/v1")
		if got := openai.shown(); len(got) != 1 || got[0] != "HTTP/1.1 Bearer "+key {
			t.Errorf("%s: the API was shown %d keys, the right one: %t", sandbox, len(got), len(got) > 0 && strings.HasSuffix(got[0], key))
		}
	}
	t.Run("Python", func(t *testing.T) { wants(t, "a", oldKey) })
	t.Run("curl by HTTP/2", func(t *testing.T) {
		s.prints(t, "a", "hello from api.openai.com", "sh", "-c", `curl -sS --http2 -H "Authorization: Bearer $OPENAI_API_KEY" https://api.openai.com/`)
		if got := openai.shown(); len(got) != 1 || got[0] != "HTTP/2.0 Bearer "+oldKey {
			t.Errorf("the API was shown %v", got)
		}
	})
	t.Run("another host is not looked at", func(t *testing.T) {
		s.prints(t, "a", "hello from www.example.org", "python3", "-c", askWithKey, "https://www.example.org/")
		if got := openai.shown(); len(got) != 1 || got[0] != "HTTP/1.1 Bearer agentrun-injected.llm.OPENAI_API_KEY" {
			t.Errorf("the other host was shown %v", got)
		}
	})
	t.Run("without TLS", func(t *testing.T) {
		s.prints(t, "a", "use https", "python3", "-c", askWithKey, "http://api.openai.com/")
		if got := openai.shown(); len(got) != 0 {
			t.Errorf("the API was shown %v", got)
		}
	})
	t.Run("a key of its own", func(t *testing.T) {
		s.prints(t, "a", "403", "sh", "-c", `curl -s -o /dev/null -w '%{http_code}' -H "Authorization: Bearer mine" https://api.openai.com/`)
	})
	t.Run("a server that is another", func(t *testing.T) {
		s.prints(t, "a", "failed", "python3", "-c", askWithKey, "https://bad.example.org/")
		s.entry(t, "a", func(e rest.NetworkLogEntry) bool {
			return strings.Contains(e.Reason, "the server's certificate was not verified: x509: certificate is valid for other.example.org, not bad.example.org")
		})
	})
	t.Run("rotation", func(t *testing.T) {
		s.rotatesOnOneConnection(t, openai)
		wants(t, "a", newKey)
	})
	t.Run("fork", func(t *testing.T) {
		s.fork(t, "a", "f", 1, nil)
		wants(t, "f-1", newKey)
	})
	t.Run("sleep", func(t *testing.T) {
		s.do(t, "f-1", client.Hibernate)
		s.do(t, "f-1", client.Resume)
		wants(t, "f-1", newKey)
	})
	t.Run("death of netd", func(t *testing.T) {
		before := s.netd(t)
		if err := syscall.Kill(before.pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		s.prints(t, "a", "hello from", "python3", "-c", strings.ReplaceAll(await, "urlopen(sys.argv[1]", `urlopen(urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer agentrun-injected.llm.OPENAI_API_KEY"})`)+"\nprint('hello from')", "https://api.openai.com/")
		wants(t, "a", newKey)
		wants(t, "f-1", newKey)
	})
	t.Run("death of the daemon", func(t *testing.T) {
		s.daemon.Kill()
		s.daemon.Up(t)
		wants(t, "a", newKey)
		s.must(t, "secret", "set", "llm", "OPENAI_API_KEY="+oldKey)
		wants(t, "f-1", oldKey)
	})
	t.Run("seen without the key", func(t *testing.T) { s.seenWithoutKey(t) })
	t.Run("a deleted secret", func(t *testing.T) {
		s.must(t, "secret", "delete", "llm")
		openai.shown()
		s.prints(t, "a", "secret llm does not exist", "python3", "-c", askWithKey, "https://api.openai.com/")
		if got := openai.shown(); len(got) != 0 {
			t.Errorf("the API was shown %v", got)
		}
	})
	t.Run("another CA", func(t *testing.T) {
		s.must(t, "secret", "set", "llm", "OPENAI_API_KEY="+newKey)
		wants(t, "a", newKey)
		s.must(t, "ca", "create", "--name", "openai.com")
		s.prints(t, "a", "failed", "python3", "-c", askWithKey, "https://api.openai.com/")
		s.entry(t, "a", func(e rest.NetworkLogEntry) bool { return strings.Contains(e.Reason, "the sandbox trusts the CA") })
		s.awaitRevision(t)
		s.claim(t, "demo", "b", `secrets: [{name: llm, key: OPENAI_API_KEY, inject: {host: api.openai.com, header: Authorization, format: "Bearer {}"}}]`)
		wants(t, "b", newKey)
	})
}

// rotatesOnOneConnection changes the key between two requests of one connection.
func (s *site) rotatesOnOneConnection(t *testing.T, openai *api) {
	t.Helper()
	openai.shown()
	s.run(t, "a", "sh", "-c", `mkfifo /tmp/next; (python3 -c "$0" <&3 >/tmp/said 2>&1 &) 3<>/tmp/next; echo go >/tmp/next`, keeps)
	await := func(lines int) {
		deadline := time.Now().Add(patience)
		for {
			if r := s.run(t, "a", "cat", "/tmp/said"); strings.Count(r.Stdout, "hello from api.openai.com\n") >= lines {
				return
			} else if time.Now().After(deadline) {
				t.Fatalf("the program said %q", r.Stdout)
			}
		}
	}
	await(1)
	s.must(t, "secret", "set", "llm", "OPENAI_API_KEY="+newKey)
	s.run(t, "a", "sh", "-c", "echo go >/tmp/next")
	await(2)
	if got := openai.shown(); len(got) != 2 || got[0] != "HTTP/1.1 Bearer "+oldKey || got[1] != "HTTP/1.1 Bearer "+newKey {
		t.Errorf("the API was shown %v", got)
	}
}

// seenWithoutKey searches for the keys in places that must not have them, and checks that
// their use has left its traces.
func (s *site) seenWithoutKey(t *testing.T) {
	t.Helper()
	places := map[string]string{
		"the sandbox's environment": s.run(t, "a", "sh", "-c", "env; cat /proc/*/environ").Stdout,
		"the daemon's log":          s.daemon.Log.String(),
		"the network log":           s.must(t, "network", "log", "a", "--json"),
		"the sandbox":               s.must(t, "get", "sandbox", "a", "--json"),
		"the CA":                    s.must(t, "ca", "show", "--json"),
	}
	hasKey := func(path string, b []byte) bool {
		// Programs in images contain these words as well.
		ca := strings.Contains(path, "authorities") && bytes.Contains(b, []byte("PRIVATE KEY"))
		return ca || bytes.Contains(b, []byte(oldKey)) || bytes.Contains(b, []byte(newKey))
	}
	err := filepath.WalkDir(s.state, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() { // a file may vanish meanwhile
			if b, err := os.ReadFile(path); err == nil && hasKey(path, b) {
				t.Errorf("a key is in %s", path)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	for place, text := range places {
		if strings.Contains(text, oldKey) || strings.Contains(text, newKey) || strings.Contains(text, "PRIVATE KEY") {
			t.Errorf("a key is in %s", place)
		}
	}
	for place, want := range map[string]string{
		"the sandbox's environment": "OPENAI_API_KEY=agentrun-injected.llm.OPENAI_API_KEY",
		"the daemon's log":          "requests of a sandbox get a secret",
		"the network log":           "credentials: llm/OPENAI_API_KEY x1",
		"the CA":                    "BEGIN CERTIFICATE",
	} {
		if !strings.Contains(places[place], want) {
			t.Errorf("%s has no %q: %s", place, want, places[place])
		}
	}
}

// awaitRevision waits until the pool has sandboxes of its template's present revision.
func (s *site) awaitRevision(t *testing.T) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		p, err := s.client.Pool(t.Context(), "demo")
		if err != nil {
			t.Fatal(err)
		}
		if p.Phase == "Ready" && p.Snapshots > 0 && p.Ready == p.Snapshots {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the pool is %+v", p)
		}
		time.Sleep(50 * time.Millisecond) // REST has no event for it
	}
}
