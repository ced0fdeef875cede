package guestrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

func testHello() []byte {
	h := hello{minVersion: 1, maxVersion: 1, maxPayload: MaxPayload, window: minWindow, capabilities: []string{"x"}}
	return h.append(nil)
}

func frame(t frameType, c Channel, stream uint32, payload ...byte) []byte {
	b := appendHeader(nil, header{typ: t, channel: c, stream: stream, length: uint32(len(payload))})
	return append(b, payload...)
}

func window(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }

func openFrame(id uint32, m Method, req message) []byte {
	b, err := marshal(binary.AppendUvarint(nil, uint64(m)), req)
	if err != nil {
		panic(err)
	}
	return frame(frameOpen, 0, id, b...)
}

func concat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// hugeHello claims 4 billion capabilities.
func hugeHello() []byte {
	b := []byte{1, 1, 1, 0x80, 0x80, 4, 0x80, 0x80, 4, 0xff, 0xff, 0xff, 0xff, 0x0f}
	return concat([]byte(magic), []byte{byte(len(b)), 0}, b)
}

func versions(lo, hi uint64) []byte {
	h := hello{minVersion: lo, maxVersion: hi, maxPayload: MaxPayload, window: minWindow}
	return h.append(nil)
}

var (
	exec     = openFrame(1, MethodExec, &ExecRequest{Argv: []string{"pause"}, Stdin: true})
	write    = openFrame(1, MethodWrite, &WriteRequest{Path: "stuck"})
	oversize = append(appendHeader(nil, header{typ: frameData, stream: 1, length: MaxPayload + 1}), 1)
)

// hostileFrames are frames that no correct host sends after its hello.
var hostileFrames = []struct {
	name string
	in   []byte
	want string // part of the error
}{
	{"unknown type", frame(11, 0, 1), "unknown frame type 11"},
	{"type 0", frame(0, 0, 1), "unknown frame type 0"},
	{"flags", []byte{4, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}, "reserved"},
	{"reserved byte", []byte{4, 0, 0, 9, 1, 0, 0, 0, 0, 0, 0, 0}, "reserved"},
	{"oversize length", oversize, "the limit is 65536"},
	{"4 GiB length", appendHeader(nil, header{typ: frameOpen, stream: 1, length: 1<<32 - 1}), "the limit is 65536"},
	{"channel 4", frame(frameData, 4, 1, 1), "bad channel"},
	{"channel on OPEN", frame(frameOpen, 1, 1, 1), "bad channel"},
	{"even id", frame(frameOpen, 0, 2, 1), "not odd"},
	{"stream 0", frame(frameData, 0, 0, 1), "not odd"},
	{"ping on a stream", frame(framePing, 0, 1, make([]byte, 8)...), "session frame"},
	{"short ping", frame(framePing, 0, 0, 1), "wrong size"},
	{"long EOF", frame(frameEOF, 0, 1, 1), "wrong size"},
	{"short window", frame(frameWindow, 0, 1, 1, 0), "wrong size"},
	{"empty OPEN", frame(frameOpen, 0, 1), "without a method"},
	{"huge method", frame(frameOpen, 0, 1, 0xff, 0xff, 0xff, 0x7f), "without a method"},
	{"id used twice", concat(write, write), "opened twice"},
	{"id going back", concat(openFrame(5, MethodExec, &ExecRequest{Argv: []string{"pause"}}), write), "opened twice"},
	{"data on a stream never opened", frame(frameData, 0, 1, 1), "never opened"},
	{"reset of a stream never opened", frame(frameReset, 0, 7), "never opened"},
	{"data beyond the window", concat(write, frame(frameData, 0, 1, make([]byte, MaxPayload)...), frame(frameData, 0, 1, 1)), "beyond the window"},
	{"data after EOF", concat(write, frame(frameEOF, 0, 1), frame(frameData, 0, 1, 1)), "after EOF"},
	{"EOF twice", concat(write, frame(frameEOF, 0, 1), frame(frameEOF, 0, 1)), "EOF on a channel"},
	{"data on stdout", concat(exec, frame(frameData, Stdout, 1, 1)), "does not use"},
	{"EOF on stdout", concat(exec, frame(frameEOF, Stdout, 1)), "not used"},
	{"data for a call without any", concat(openFrame(1, MethodSync, &empty{}), frame(frameData, 0, 1, 1)), "does not use"},
	{"window of 0", concat(exec, frame(frameWindow, Stdout, 1, window(0)...)), "WINDOW"},
	{"window of 4 GiB", concat(exec, frame(frameWindow, Stdout, 1, window(1<<32-1)...)), "WINDOW"},
	{"windows adding up", concat(exec, frame(frameWindow, Stdout, 1, window(maxWindow)...), frame(frameWindow, Stdout, 1, window(maxWindow)...), frame(frameWindow, Stdout, 1, window(maxWindow)...)), "WINDOW"},
	{"HEADERS from the host", concat(exec, frame(frameHeaders, 0, 1)), "sent a reply"},
	{"REPLY from the host", concat(exec, frame(frameReply, 0, 1)), "sent a reply"},
	{"bad RESET", concat(exec, frame(frameReset, 0, 1, 1, 2, 0xff)), "RESET"},
	{"bad GOAWAY", frame(frameGoaway, 0, 0, 0), "GOAWAY"},
}

// stuckGuest has a Write and a Sync that last until they are cancelled.
func stuckGuest() Handler {
	g := newFakeGuest()
	g.block = make(chan struct{})
	return &bulkGuest{fakeGuest: g, reading: make(chan struct{})}
}

// serveBytes lets a host send in and close its end. It returns the bytes that Serve
// sent, and how Serve ended.
func serveBytes(t *testing.T, h Handler, in []byte) ([]byte, error) {
	t.Helper()
	host, guest := socketPair(t)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), guest, h) }()
	go func() {
		host.Write(in)
		host.(interface{ CloseWrite() error }).CloseWrite()
	}()
	out, _ := io.ReadAll(host)
	return out, <-served
}

func TestHostileHost(t *testing.T) {
	for _, tt := range hostileFrames {
		t.Run(tt.name, func(t *testing.T) {
			out, err := serveBytes(t, stuckGuest(), concat(testHello(), tt.in))
			var pe *ProtocolError
			if !errors.As(err, &pe) || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("Serve returned %v, want a violation with %q", err, tt.want)
			}
			if !bytes.Contains(out, []byte(pe.Reason)) {
				t.Errorf("no GOAWAY with the reason in %q", out)
			}
		})
	}
}

var hostileHellos = []struct {
	name string
	in   []byte
	want string
}{
	{"bad magic", []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), "not an AgentRun"},
	{"cut magic", []byte("AGR"), "not an AgentRun"},
	{"cut hello", testHello()[:14], "unexpected EOF"},
	{"no hello", []byte(magic + "\x10\x00"), "unexpected EOF"},
	{"oversize hello", append([]byte(magic), 0xff, 0xff), "hello of 65535 bytes"},
	{"empty hello", append([]byte(magic), 0, 0), "hello:"},
	{"huge count", hugeHello(), "hello:"},
	{"version 0", versions(0, 1), "impossible version range"},
	{"versions reversed", versions(3, 2), "impossible version range"},
	{"newer peer", versions(7, 9), "no common guest protocol version: we speak 1, the peer speaks 7 to 9; update this end"},
	{"tiny window", func() []byte {
		h := hello{minVersion: 1, maxVersion: 1, maxPayload: MaxPayload, window: 1}
		return h.append(nil)
	}(), "below 4096"},
}

func TestHostileHello(t *testing.T) {
	for _, tt := range hostileHellos {
		t.Run("host "+tt.name, func(t *testing.T) {
			_, err := serveBytes(t, stuckGuest(), tt.in)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Serve returned %v, want %q", err, tt.want)
			}
		})
		t.Run("guest "+tt.name, func(t *testing.T) {
			host, guest := socketPair(t)
			guest.Write(tt.in)
			guest.(interface{ CloseWrite() error }).CloseWrite()
			if _, err := Dial(host); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Dial returned %v, want %q", err, tt.want)
			}
		})
	}
}

func TestVersionErrorNamesTheOlderEnd(t *testing.T) {
	err := &VersionError{OurMin: 3, OurMax: 4, PeerMin: 1, PeerMax: 2}
	want := "no common guest protocol version: we speak 3 to 4, the peer speaks 1 to 2; update the peer"
	if !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %q", err)
	}
	if _, err := negotiate(hello{minVersion: 1, maxVersion: 9}); err != nil {
		t.Error(err)
	}
}

func TestTruncatedFrames(t *testing.T) {
	whole := concat(exec, frame(frameData, 0, 1, 1, 2, 3))
	for n := 1; n < len(whole); n++ {
		_, err := serveBytes(t, newFakeGuest(), concat(testHello(), whole[:n]))
		if n == len(exec) {
			if err != nil {
				t.Errorf("cut between frames: %v", err)
			}
			continue
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("cut at %d: %v", n, err)
		}
	}
}

func TestMalformedRequestsAreRefused(t *testing.T) {
	payloads := map[string][]byte{
		"no message":     {byte(MethodExec)},
		"version 0":      {byte(MethodExec), 0},
		"huge count":     {byte(MethodExec), 1, 0, 0xff, 0xff, 0xff, 0xff, 0x7f},
		"huge string":    {byte(MethodStat), 1, 0xff, 0xff, 0xff, 0xff, 0x7f},
		"trailing bytes": {byte(MethodSync), 1, 0},
		"unknown method": {99, 1},
		"bad enum":       {byte(MethodSignal), 1, 1, 'x', 9, 77},
	}
	for name, b := range malformedRenewals {
		payloads["renewal with "+name] = append([]byte{byte(MethodRenew)}, b...)
	}
	for name, payload := range payloads {
		t.Run(name, func(t *testing.T) {
			// The session goes on: the ping after it is answered.
			out, err := serveBytes(t, newFakeGuest(), concat(testHello(), frame(frameOpen, 0, 1, payload...), frame(framePing, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8)))
			if err != nil {
				t.Fatal(err)
			}
			r := newFrameReader(bytes.NewReader(out))
			if _, err := readHello(r); err != nil {
				t.Fatal(err)
			}
			h, p, err := r.next()
			if err != nil || h.typ != frameReset || h.stream != 1 {
				t.Fatalf("got %+v, %v", h, err)
			}
			e, err := decodeError(p)
			if err != nil || e.Code != CodeInvalidArgument {
				t.Fatalf("got %v, %v", e, err)
			}
			expectNoSecret(t, e.Error())
			if h, _, err := r.next(); err != nil || h.typ != framePong {
				t.Errorf("got %+v, %v", h, err)
			}
		})
	}
}

func TestFramesOfForgottenStreamsAreDropped(t *testing.T) {
	reset := frame(frameReset, 0, 1, appendError(nil, errCancelled)...)
	_, err := serveBytes(t, newFakeGuest(), concat(testHello(), exec, reset, frame(frameData, 0, 1, 1), frame(frameEOF, 0, 1), frame(frameEOF, 0, 1), frame(frameWindow, 1, 1, window(1)...), reset))
	if err != nil {
		t.Error(err)
	}
}

func TestOpenFloodIsBounded(t *testing.T) {
	host, guest := socketPair(t)
	served := make(chan error, 1)
	g := newFakeGuest()
	g.block = make(chan struct{})
	go func() { served <- Serve(context.Background(), guest, g) }()
	host.Write(testHello())
	// The host reads no answers, so refusals accumulate up to the limit.
	id := uint32(1)
	for {
		_, err := host.Write(openFrame(id, MethodSync, &empty{}))
		if err != nil {
			break
		}
		if id += 2; id > 1<<20 {
			t.Fatal("the guest takes opens without end")
		}
	}
	if err := <-served; !errors.Is(err, errPendingFull) {
		t.Errorf("Serve: %v", err)
	}
	if n := len(g.blocked); n > MaxStreams {
		t.Errorf("%d calls ran at a time", n)
	}
}

func TestPingFloodIsBounded(t *testing.T) {
	host, guest := socketPair(t)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), guest, newFakeGuest()) }()
	host.Write(testHello())
	ping := bytes.Repeat(frame(framePing, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8), 100)
	for n := 0; ; n++ {
		if _, err := host.Write(ping); err != nil {
			break
		}
		if n > 1<<16 {
			t.Fatal("the guest takes pings without end")
		}
	}
	if err := <-served; !errors.Is(err, errPendingFull) {
		t.Errorf("Serve: %v", err)
	}
}

// TestReadLoopGoesOnWhileWritesAreBlocked: while a host does not read and the guest
// has many frames to send, the guest still reads the host's frames.
func TestReadLoopGoesOnWhileWritesAreBlocked(t *testing.T) {
	host, guest := socketPair(t)
	g := newFakeGuest()
	g.block = make(chan struct{})
	go Serve(context.Background(), guest, &bulkGuest{fakeGuest: g, size: 1 << 40})
	host.Write(versionsWindow(maxWindow))
	host.Write(openFrame(1, MethodRead, &ReadRequest{Path: "x"}))
	for id := uint32(3); id < 103; id += 2 {
		host.Write(frame(framePing, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8))
		host.Write(openFrame(id, MethodSync, &empty{}))
		<-g.blocked
	}
	close(g.block)
	// Now the host reads: every ping is answered, and every call has a reply.
	r := newFrameReader(host)
	if _, err := readHello(r); err != nil {
		t.Fatal(err)
	}
	pongs, replies := 0, 0
	for pongs < 50 || replies < 50 {
		h, _, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		switch h.typ {
		case framePong:
			pongs++
		case frameReply:
			replies++
		}
	}
}

func versionsWindow(n uint32) []byte {
	h := hello{minVersion: 1, maxVersion: 1, maxPayload: MaxPayload, window: n}
	return h.append(nil)
}

// hostileAnswers are answers that no correct guest sends to an Exec on stream 1.
var hostileAnswers = []struct {
	name string
	in   []byte
	want string
}{
	{"OPEN", frame(frameOpen, 0, 1, 1), "opened a stream"},
	{"stream never opened", frame(frameReply, 0, 3), "never opened"},
	{"DATA before HEADERS", frame(frameData, Stdout, 1, 1), "before HEADERS"},
	{"REPLY before HEADERS", frame(frameReply, 0, 1, 1), "out of order"},
	{"HEADERS twice", concat(started, started), "out of order"},
	{"data on stdin", concat(started, frame(frameData, Stdin, 1, 1)), "does not use"},
	{"data on control", concat(started, frame(frameData, Control, 1, 1)), "does not use"},
	{"data beyond the window", concat(started, bytes.Repeat(frame(frameData, Stderr, 1, make([]byte, MaxPayload)...), 5)), "beyond the window"},
	{"data after EOF", concat(started, frame(frameEOF, Stdout, 1), frame(frameData, Stdout, 1, 1)), "after EOF"},
	{"window of 0", concat(started, frame(frameWindow, Stdin, 1, window(0)...)), "WINDOW"},
	{"oversize", oversize, "the limit is 65536"},
	{"bad RESET", frame(frameReset, 0, 1), "RESET"},
	{"cut frame", []byte{4, 0, 1}, "unexpected EOF"},
	{"nothing", nil, "closed by peer"},
	{"GOAWAY", frame(frameGoaway, 0, 0, appendError(nil, newError(CodeAborted, "going down"))...), "going down"},
	{"malformed HEADERS", frame(frameHeaders, 0, 1, 1, 0xff), "malformed reply"},
	{"malformed exit", concat(started, frame(frameReply, 0, 1, 1)), "malformed reply"},
	{"RESET with an unknown code", frame(frameReset, 0, 1, 1, 99, 2, 'n', 'o'), "no (internal)"},
}

var started = func() []byte {
	b, _ := marshal(nil, &ExecStarted{ID: "x", PID: 1})
	return frame(frameHeaders, 0, 1, b...)
}()

// dialHostile returns a client of a guest that answers the first call with in,
// whatever the call is, and then sends nothing more.
func dialHostile(t *testing.T, in []byte) *Client {
	t.Helper()
	host, guest := socketPair(t)
	go func() {
		r := newFrameReader(guest)
		readHello(r)
		guest.Write(testHello())
		r.next() // the OPEN
		guest.Write(in)
		guest.(interface{ CloseWrite() error }).CloseWrite()
	}()
	c, err := Dial(host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestHostileGuest(t *testing.T) {
	for _, tt := range hostileAnswers {
		t.Run(tt.name, func(t *testing.T) {
			c := dialHostile(t, tt.in)
			x, err := c.Exec(testContext(t), ExecRequest{Argv: []string{"x"}})
			if err == nil {
				_, err = x.Wait()
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestHostileEvents(t *testing.T) {
	for name, data := range map[string][]byte{
		"oversize": {0xff, 0xff},
		"garbage":  {2, 0, 1, 99},
		"cut":      {9, 0},
	} {
		t.Run(name, func(t *testing.T) {
			c := dialHostile(t, concat(frame(frameHeaders, 0, 1, 1), frame(frameData, Control, 1, data...), frame(frameReply, 0, 1, 1)))
			w, err := c.Watch(testContext(t), WatchRequest{Path: "/"})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Next(); err == nil || err == io.EOF {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestGoawayRefusesNewCalls(t *testing.T) {
	c := start(t, newFakeGuest())
	c.s.handle(header{typ: frameGoaway}, appendError(nil, newError(CodeAborted, "draining")))
	err := c.Sync(testContext(t))
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeUnavailable || !strings.Contains(err.Error(), "draining") {
		t.Errorf("got %v", err)
	}
	if err := c.Ping(testContext(t)); err != nil {
		t.Error(err)
	}
}

func TestStreamIdsRunOut(t *testing.T) {
	c := start(t, newFakeGuest())
	c.s.mu.Lock()
	c.s.lastID = maxStreamID - 2
	c.s.mu.Unlock()
	if err := c.Sync(testContext(t)); err != nil {
		t.Fatal(err)
	}
	var e *Error
	if err := c.Sync(testContext(t)); !errors.As(err, &e) || e.Code != CodeUnavailable {
		t.Errorf("got %v", err)
	}
}

// endlessPages lists the same process again and again.
type endlessPages struct{ *fakeGuest }

func (endlessPages) ListExecs(context.Context, *ListExecsRequest) (ListExecsReply, error) {
	return ListExecsReply{Execs: []ExecInfo{{ID: "a", Started: time.Unix(0, 0)}}, More: true}, nil
}

func TestEndlessPagesEnd(t *testing.T) {
	c := start(t, endlessPages{newFakeGuest()})
	if list, err := c.ListExecs(testContext(t)); err == nil {
		t.Errorf("got %d processes", len(list))
	}
}
