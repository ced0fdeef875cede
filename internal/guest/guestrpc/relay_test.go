package guestrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
)

// throughRelay puts a relay before the guest of each test. Tests do not run at once.
var throughRelay bool

// relayTo makes all calls on one session.
type relayTo struct {
	agent  *Client
	refuse error

	mu    sync.Mutex // protects all following fields
	begun []Method
	ended int
}

func (r *relayTo) Begin(_ context.Context, c Call) (Relayed, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun = append(r.begun, c.Method)
	return r, r.refuse
}

func (r *relayTo) Agent() *Client { return r.agent }

func (r *relayTo) Connect(ctx context.Context, port uint16) (RelayedPort, error) {
	return r.agent.Connect(ctx, ConnectRequest{Port: port})
}

func (r *relayTo) End(error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended++
}

// relay is a client of a relay. Its connection is no socket, as that of gRPC is none.
func relay(t testing.TB, to Relay) *Client {
	t.Helper()
	client, server := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- ServeRelay(context.Background(), server, to, "test") }()
	c, err := Dial(client)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		if err := <-served; err != nil && !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("ServeRelay: %v", err)
		}
	})
	return c
}

// TestRelayed: through a relay all that can be relayed is as it is without.
func TestRelayed(t *testing.T) {
	throughRelay = true
	defer func() { throughRelay = false }()
	for name, test := range map[string]func(*testing.T){
		"run": TestRun, "exec": TestExecSession, "execs": TestListExecsFollowsPages, "files": TestFiles, "verbs": TestFileVerbs,
		"watch": TestWatch, "limits": TestRequestOverItsLimits, "connect": TestConnect, "refused": TestConnectRefused,
	} {
		t.Run(name, test)
	}
}

// TestRelayRefuses: what is the business of whoever runs the guest never gets to it, nor
// what is not known; the session goes on.
func TestRelayRefuses(t *testing.T) {
	g := newFakeGuest()
	to := &relayTo{agent: start(t, g)}
	c := relay(t, to)
	ctx := testContext(t)
	private := []Method{MethodInfo, MethodSync, MethodShutdown, MethodRenew, MethodPrepare, MethodSetEnv, MethodSetClock}
	for m := range Method(2000) {
		if relayedRequest(m) != nil {
			if slices.Contains(private, m) {
				t.Errorf("method %d is relayed", m)
			}
			continue
		}
		var e *Error
		if err := c.call(ctx, m, &empty{}, &empty{}); !errors.As(err, &e) || e.Code != CodePermissionDenied {
			t.Errorf("method %d: %v", m, err)
		}
	}
	if err := c.Ping(ctx); err != nil {
		t.Error(err)
	}
	if len(to.begun) > 0 || len(g.calls)+len(g.renewed)+len(g.clocks)+len(g.prepared) > 0 || g.shutdown != nil {
		t.Errorf("asked about %v; the guest got %v", to.begun, g.calls)
	}
	to.refuse = newError(CodeFailedPrecondition, "not today")
	var e *Error
	if _, err := c.Run(ctx, ExecRequest{Argv: []string{"echo"}}, nil, nil, nil); !errors.As(err, &e) || e.Message != "not today" {
		t.Errorf("%v", err)
	}
	if to.ended != 0 {
		t.Errorf("%d calls have ended that never began", to.ended)
	}
}

// TestRelayStalled: a call whose client does not read holds up no other call of the
// session, and ends when it is cancelled.
func TestRelayStalled(t *testing.T) {
	g := newFakeGuest()
	to := &relayTo{agent: start(t, &bulkGuest{fakeGuest: g, size: 1 << 30})}
	c := relay(t, to)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	for range 8 {
		if _, err := c.OpenRead(ctx, ReadRequest{Path: "/endless"}); err != nil {
			t.Fatal(err)
		}
	}
	for range 100 {
		if _, err := c.Run(testContext(t), ExecRequest{Argv: []string{"echo", "x"}}, nil, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if _, err := c.ListExecs(testContext(t)); err != nil {
		t.Fatal(err)
	}
	to.mu.Lock()
	defer to.mu.Unlock()
	if len(to.begun) < 109 { // some are released as well
		t.Errorf("%d calls", len(to.begun))
	}
}

// TestRelayBulk: bytes in both directions come over in order and whole.
func TestRelayBulk(t *testing.T) {
	throughRelay = true
	defer func() { throughRelay = false }()
	const size = 8 << 20
	c := start(t, &bulkGuest{fakeGuest: newFakeGuest(), size: size})
	ctx := testContext(t)
	got, err := c.ReadFile(ctx, ReadRequest{Path: "/f"}, size)
	want := make([]byte, size)
	_, _ = io.ReadFull(&noise{}, want)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	reply, err := c.WriteFile(ctx, WriteRequest{Path: "/f"}, bytes.NewReader(want))
	if err != nil || reply.Written != size {
		t.Errorf("%+v, %v", reply, err)
	}
}

// FuzzRelay: whatever a client sends, only calls that were permitted get to the guest, and
// the relay ends with its connection.
func FuzzRelay(f *testing.F) {
	for _, tt := range hostileFrames {
		f.Add(concat(testHello(), tt.in))
	}
	for _, tt := range hostileHellos {
		f.Add(tt.in)
	}
	for _, m := range []Method{MethodRenew, MethodSetEnv, MethodShutdown, MethodPrepare, MethodSetClock, MethodInfo} {
		f.Add(concat(testHello(), frame(frameOpen, 0, 1, byte(m), 1)))
	}
	f.Add(concat(testHello(), openFrame(1, MethodRenew, renewal(1)), openFrame(3, MethodStat, &StatRequest{Path: "/f"})))
	f.Add(concat(testHello(), openFrame(1, MethodConnect, &ConnectRequest{Port: 8080}), frame(frameData, Stdin, 1, 1, 2), frame(frameEOF, Stdin, 1)))
	f.Add(concat(testHello(), openFrame(1, MethodExec, &ExecRequest{Argv: []string{"cat"}, Stdin: true}), frame(frameData, Stdin, 1, 1, 2), frame(frameReset, 0, 1, appendError(nil, errCancelled)...)))
	f.Add(concat(testHello(), frame(frameOpen, 0, 1, append(binary.AppendUvarint(nil, 1<<16), 1)...)))
	f.Fuzz(func(t *testing.T, in []byte) {
		g := newFakeGuest()
		to := &relayTo{agent: start(t, g)}
		conn := newFixedConn(in)
		close(conn.ready)
		_ = ServeRelay(t.Context(), conn, to) // it ends with the input, however
		g.killAll()
		to.mu.Lock()
		defer to.mu.Unlock()
		for _, m := range to.begun {
			if relayedRequest(m) == nil {
				t.Errorf("asked about method %d", m)
			}
		}
		if to.ended != len(to.begun) {
			t.Errorf("%d calls have begun and %d have ended", len(to.begun), to.ended)
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if len(g.renewed)+len(g.clocks)+len(g.prepared) > 0 || g.shutdown != nil || slices.ContainsFunc(g.calls, func(s string) bool { return strings.HasPrefix(s, "env") }) {
			t.Errorf("the guest got %v", g.calls)
		}
		if n, limit := conn.written.Load(), int64(1<<20+100*len(in)); n > limit {
			t.Fatalf("answered %d bytes with %d", len(in), n)
		}
	})
}
