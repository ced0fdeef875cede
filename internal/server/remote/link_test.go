package remote

import (
	"testing"

	"google.golang.org/grpc/connectivity"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/accesstest"
)

// TestLinks: a connection that was replaced is closed when its last call has ended, at
// once if it has no calls, and with the others if they are all closed.
func TestLinks(t *testing.T) {
	ca, files := accesstest.NewCA(t), accesstest.NewFiles(t)
	files.WritePair(t, ca.Component("controller/c"))
	files.WriteCAs(t, ca)
	c, err := Dial(Target{Address: "127.0.0.1:1", Files: access.MutualFiles(files)})
	if err != nil {
		t.Fatal(err)
	}
	replace := func() {
		t.Helper()
		if err := c.replace(); err != nil {
			t.Fatal(err)
		}
	}
	open := func(l *link, want bool) {
		t.Helper()
		if is := l.GetState() != connectivity.Shutdown; is != want {
			t.Errorf("it is open: %t", is)
		}
	}
	idle := c.now
	replace()
	open(idle, false)
	busy, end := c.take()
	_, endOther := c.take()
	replace()
	open(busy, true)
	end()
	open(busy, true)
	endOther()
	open(busy, false)
	last, end := c.take()
	replace()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	open(last, false)
	end()
	replace() // files that were read just then
	open(c.now, false)
}
