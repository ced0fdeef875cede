package netd

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"

	"agentrun.dev/internal/network/stack"
)

// panicking is an Outside that panics, except in the dials that opens allows.
type panicking struct{ opens, closed bool }

func (p *panicking) DialTCP(context.Context, netip.AddrPort, netip.AddrPort) (stack.Remote, error) {
	if p.opens {
		return p, nil
	}
	panic("in a dial")
}

func (*panicking) DialUDP(context.Context, netip.AddrPort, netip.AddrPort) (net.Conn, error) {
	panic("in a flow")
}
func (*panicking) ServeDNS(context.Context, []byte, bool) []byte { panic("in a question") }
func (*panicking) Splice(stack.Conn)                             { panic("in a splice") }

func (p *panicking) Close() error {
	p.closed = true
	return nil
}

// resettable is the sandbox's side of a connection.
type resettable struct {
	stack.Conn
	reset bool
}

func (r *resettable) Reset() error {
	r.reset = true
	return nil
}

// TestPanics: a panic ends one connection, and is logged with its stack.
func TestPanics(t *testing.T) {
	var logged bytes.Buffer
	p := &panicking{}
	c := &caught{outside: p, log: slog.New(slog.NewTextHandler(&logged, nil))}
	if r, err := c.DialTCP(t.Context(), netip.AddrPort{}, netip.AddrPort{}); r != nil || !errors.Is(err, stack.ErrRefused) {
		t.Errorf("a dial: %v, %v", r, err)
	}
	if conn, err := c.DialUDP(t.Context(), netip.AddrPort{}, netip.AddrPort{}); conn != nil || !errors.Is(err, stack.ErrRefused) {
		t.Errorf("a flow: %v, %v", conn, err)
	}
	if answer := c.ServeDNS(t.Context(), nil, false); answer != nil {
		t.Errorf("a question: %q", answer)
	}
	p.opens = true
	r, err := c.DialTCP(t.Context(), netip.AddrPort{}, netip.AddrPort{})
	if err != nil {
		t.Fatal(err)
	}
	inside := &resettable{}
	if r.Splice(inside); !inside.reset || !p.closed {
		t.Errorf("a splice: the inside was reset: %t, the outside was closed: %t", inside.reset, p.closed)
	}
	for _, want := range []string{"in a dial", "in a flow", "in a question", "in a splice", "caught_test.go"} {
		if !strings.Contains(logged.String(), want) {
			t.Errorf("the log lacks %q: %s", want, &logged)
		}
	}
}
