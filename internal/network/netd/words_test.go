package netd_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
	"golang.org/x/net/dns/dnsmessage"
)

// TestLastWords: unsolicited bytes of a server, which may echo a credential, are not
// in the file of netd's last words.
func TestLastWords(t *testing.T) {
	const echoed = "sk-live-0123456789"
	cfg, _ := config(t)
	p := start(t, cfg)
	w := networktest.NewWorld(t, public)
	go resolve(w.ListenPacket(t, netip.AddrPortFrom(public, 53).String()))
	l := w.Listen(t, netip.AddrPortFrom(public, 80).String())
	answered, givenUp := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(givenUp)
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = http.ReadRequest(bufio.NewReader(c))
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		<-answered
		_, _ = io.WriteString(c, echoed)
		_, _ = io.Copy(io.Discard, c)
		_ = c.Close()
	}()
	if err := p.Configure(t.Context(), netctl.Settings{Upstreams: []netip.AddrPort{netip.AddrPortFrom(public, 53)}}); err != nil {
		t.Fatal(err)
	}
	g := networktest.New(t)
	p.attach(t, g, wireOf("w", rules("api.example.com:80")))
	if m, err := ask(t, g, "api.example.com."); err != nil || len(m.Answers) != 1 {
		t.Fatalf("an allowed name: %+v, %v", m, err)
	}
	c, err := g.Dial(t.Context(), "tcp", netip.AddrPortFrom(public, 80).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(c)
	r, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		t.Fatal(err)
	}
	_ = r.Body.Close()
	close(answered)
	<-givenUp // netd has given up, and would have logged by now
	said, err := os.ReadFile(filepath.Join(cfg.Folder, "stderr"))
	if err != nil || strings.Contains(string(said), echoed) {
		t.Errorf("its last words: %q, %v", said, err)
	}
}

// TestWildcardsAreInherited: a fork's wire starts with the counts of the names that
// the source has asked for below wildcards.
func TestWildcardsAreInherited(t *testing.T) {
	path, _ := here(t, time.Minute)
	c := dial(t, path)
	g, fork := networktest.New(t), networktest.New(t)
	if err := c.Attach(t.Context(), wireOf("w", rules("*.example.org:443")), g.Wire()); err != nil {
		t.Fatal(err)
	}
	for i := range 3 { // no upstream answers, which does not matter here
		if _, err := ask(t, g, fmt.Sprintf("n%d.example.org.", i)); err != nil {
			t.Fatal(err)
		}
	}
	collect := func(id netctl.ID) netctl.Lineage {
		mark, err := c.Mark(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		l, err := c.Collect(t.Context(), id, mark)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := collect("w")
	if len(l.Wildcards) != 1 || l.Wildcards[0].Pattern != "*.example.org:443" || l.Wildcards[0].Names != 3 {
		t.Fatalf("%+v is inherited", l.Wildcards)
	}
	l.Wildcards[0].Names = 127
	w := wireOf("fork", rules("*.example.org:443"))
	w.Lineage = l
	if err := c.Attach(t.Context(), w, fork.Wire()); err != nil {
		t.Fatal(err)
	}
	for i, refused := range []bool{false, true} {
		m, err := ask(t, fork, fmt.Sprintf("f%d.example.org.", i))
		if err != nil || (m.RCode == dnsmessage.RCodeRefused) != refused {
			t.Errorf("name %d of the fork: %v, %v", i, m.RCode, err)
		}
	}
	if l := collect("fork"); len(l.Wildcards) != 1 || l.Wildcards[0].Names != 128 {
		t.Errorf("%+v is inherited of the fork", l.Wildcards)
	}
}
