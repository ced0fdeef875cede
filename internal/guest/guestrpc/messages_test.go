package guestrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentrun.dev/internal/codec"
)

// samples holds one message of every type, with every field set.
func samples() []message {
	scope := FileScope{User: "ann", Workdir: "/home/ann"}
	exit := ExitStatus{
		Code: 137, Signal: 9, Core: true, TimedOut: true, Stdout: OutputTotal{Bytes: 1 << 40, Dropped: 5},
		Stderr: OutputTotal{Bytes: 2, Dropped: 1}, Wall: time.Hour, UserTime: 1, SystemTime: 2, MaxRSS: 3 << 30,
	}
	file := FileInfo{Path: "a/b", Mode: ModeSymlink | 0o777, Size: 9, UID: 1, GID: math.MaxUint32, Owner: "o", Group: "g", ModTime: time.Unix(-5, 7), Target: "t"}
	return []message{
		&empty{},
		&Info{AgentVersion: "1", Kernel: "6.1", Arch: "m", Hostname: "h", BootID: "b", Uptime: 5, Generation: math.MaxUint64, Processes: 4, Execs: 5, MemoryTotal: 6, MemoryFree: 7},
		&ShutdownRequest{Mode: Reboot, Grace: time.Second},
		&ExecRequest{
			ID: "i", Argv: []string{"sh", "-c", ""}, Env: []string{"A=b"}, CleanEnv: true, Workdir: "/", User: "1:2",
			TTY: true, Rows: 24, Cols: math.MaxUint16, Timeout: time.Minute, Stdin: true,
		},
		&AttachRequest{ID: "i", StdoutOffset: math.MaxInt64, StderrOffset: -1},
		&ExecStarted{ID: "i", PID: math.MaxInt32, Stdout: OutputStart{Offset: 3, Dropped: 4}, Stderr: OutputStart{Offset: 5, Dropped: 6}},
		&exit,
		&ListExecsRequest{After: "a"},
		&ListExecsReply{More: true, Execs: []ExecInfo{
			{ID: "i", PID: 1, Argv: []string{"x"}, User: "u", Workdir: "/", TTY: true, Started: time.Unix(1, 999999999), Running: true},
			{Exit: exit},
		}},
		&SignalRequest{ID: "i", Signal: 15, Scope: ScopeSession},
		&ResizeRequest{ID: "i", Rows: 1, Cols: 2},
		&WriteStdinRequest{ID: "i", Data: []byte{0, 255}, EOF: true},
		&ReleaseExecRequest{ID: "i"},
		&ConnectRequest{Port: math.MaxUint16},
		&StatRequest{FileScope: scope, Path: "/p", Follow: true},
		&file,
		&ListRequest{FileScope: scope, Path: "/p", Depth: 3, Token: "x", Limit: 7},
		&ListReply{Entries: []FileInfo{file, {}}, Next: "n"},
		&ReadRequest{FileScope: scope, Path: "/p", Offset: 5},
		&WriteRequest{FileScope: scope, Path: "/p", Perm: 0o4755, Mode: WriteAppend, Offset: 9, NoCreate: true, Exclusive: true, Parents: true, Sync: true, Atomic: true},
		&WriteReply{Written: 1, Size: 2},
		&MkdirRequest{FileScope: scope, Path: "/p", Perm: 0o755, Parents: true},
		&MoveRequest{FileScope: scope, From: "a", To: "b", Overwrite: true},
		&RemoveRequest{FileScope: scope, Path: "/p", Recursive: true},
		&SymlinkRequest{FileScope: scope, Path: "/p", Target: "t"},
		&ReadlinkRequest{FileScope: scope, Path: "/p"},
		&readlinkReply{target: "t"},
		&ChmodRequest{FileScope: scope, Path: "/p", Perm: 0o7777},
		&ChownRequest{FileScope: scope, Path: "/p", Owner: "1", Group: "2", Follow: true},
		&WatchRequest{FileScope: scope, Path: "/p", Recursive: true},
		&WatchEvent{Kind: EventGone, Path: "/p", Dir: true, Cookie: 7},
		&RenewRequest{
			Entropy: bytes.Repeat([]byte{0xa5}, MaxEntropy), WallClock: time.Unix(0, math.MaxInt64), Hostname: "h",
			MachineID: strings.Repeat("f", maxMachineID), Generation: math.MaxUint64,
		},
		&RenewReply{Generation: math.MaxUint64, ClockStep: math.MinInt64},
		&PrepareRequest{Settle: true},
		&SetClockRequest{WallClock: time.Unix(0, math.MaxInt64)},
		&SetEnvRequest{Env: []string{"A=b", ""}},
		&CodeRunRequest{
			ID: "i", Context: "c", Language: "python", Mode: ModeText, Source: "1 + 1", More: true, Env: []string{"A=b"}, Timeout: time.Minute,
		},
		&CodeAttachRequest{ID: "i", StdoutOffset: math.MaxInt64, StderrOffset: -1, Event: math.MinInt64},
		&CodeStarted{ID: "i", Context: "c", Stdout: OutputStart{Offset: 3, Dropped: 4}, Stderr: OutputStart{Offset: 5, Dropped: 6}, Events: OutputStart{Offset: 7, Dropped: 8}},
		&CodeStatus{
			State: CodeCancelled, Code: -1, TimedOut: true, Fresh: true, FreshReason: "f", Reason: "r", Language: "shell", Count: math.MaxUint64,
			Stdout: OutputTotal{Bytes: 1, Dropped: 2}, Stderr: OutputTotal{Bytes: 3, Dropped: 4}, Events: OutputTotal{Bytes: 5, Dropped: 6}, Wall: time.Hour,
		},
		&CodeEvent{Seq: math.MaxUint64, Kind: 255, Stdout: 1, Stderr: -2, Data: []byte("data")},
		&CodeBegun{Fresh: true, Reason: "r", PID: math.MaxInt32},
		&CodeResult{Items: []CodeItem{{MIME: "text/plain", Data: []byte("x")}, {MIME: "image/png"}}},
		&CodeError{Name: "n", Value: "v", Traceback: "t"},
		&CodeInterruptRequest{Context: "c", ID: "i"},
		&CodeReleaseRequest{ID: "i"},
		&CodeCreateRequest{ID: "i", Language: "node", Workdir: "/", User: "1:2", Env: []string{"A=b"}, Start: true},
		&CodeListReply{Contexts: []CodeContext{{ID: "i", Language: "l", Workdir: "/", User: "u", PID: math.MaxInt32, Version: "3", Running: "r", Queued: math.MaxUint32}, {}}},
		&CodeContextRequest{ID: "i"},
	}
}

func fresh(m message) message { return reflect.New(reflect.TypeOf(m).Elem()).Interface().(message) }

func TestMessagesRoundTrip(t *testing.T) {
	for _, m := range samples() {
		for _, in := range []message{m, fresh(m)} {
			b, err := marshal(nil, in)
			if err != nil {
				t.Fatalf("%T: %v", in, err)
			}
			out := fresh(in)
			if err := unmarshal(b, out); err != nil {
				t.Fatalf("%T: %v", in, err)
			}
			if !reflect.DeepEqual(in, out) {
				t.Errorf("%T:\n got %+v\nwant %+v", in, out, in)
			}
			// A message that is cut anywhere is an error, not a shorter message.
			for n := range b {
				if err := unmarshal(b[:n], fresh(in)); err == nil {
					t.Errorf("%T: %d of %d bytes were accepted", in, n, len(b))
				}
			}
			// A newer peer may append fields.
			b[0] = 2
			out = fresh(in)
			if err := unmarshal(append(b, "more"...), out); err != nil || !reflect.DeepEqual(in, out) {
				t.Errorf("%T: from a newer peer: %v", in, err)
			}
		}
	}
}

func TestOverlongFieldsAreNotSent(t *testing.T) {
	long := strings.Repeat("x", MaxPayload+1)
	for _, m := range []message{
		&StatRequest{Path: long},
		&ListReply{Entries: make([]FileInfo, maxListItems+1)},
		&ListReply{Entries: []FileInfo{{Path: long}}},
		&ListExecsReply{Execs: []ExecInfo{{Argv: []string{strings.Repeat("x", 4096), strings.Repeat("x", 4096), strings.Repeat("x", 4096), strings.Repeat("x", 4096), strings.Repeat("x", 4096), "x"}}}},
		&ExecStarted{PID: -1},
		&ChmodRequest{Perm: 0o10000},
		&RenewRequest{Entropy: make([]byte, MaxEntropy+1)},
		&RenewRequest{Hostname: long},
		&RenewRequest{MachineID: strings.Repeat("f", maxMachineID+1)},
		&RenewRequest{WallClock: time.Unix(0, 0)},
		&RenewRequest{WallClock: time.Unix(0, -1)},
		&RenewRequest{WallClock: time.Unix(0, math.MaxInt64).Add(1)},
		&RenewRequest{WallClock: time.Unix(18446744075, 0)}, // 2^64 ns and a second: wraps to after 1970
		&nesting{inner: StatRequest{Path: long}},
		&CodeRunRequest{Source: long},
		&CodeRunRequest{Mode: ModeText + 1},
		&CodeEvent{Data: make([]byte, MaxCodeEvent+1)},
		&CodeResult{Items: make([]CodeItem, maxCodeItems+1)},
		&CodeResult{Items: []CodeItem{{MIME: long}}},
		&CodeListReply{Contexts: make([]CodeContext, maxContexts+1)},
	} {
		if _, err := marshal(nil, m); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%T: %v", m, err)
		}
	}
}

func TestPagesFitAFrame(t *testing.T) {
	files := make([]FileInfo, 5000)
	for i := range files {
		files[i] = FileInfo{Path: "/" + strings.Repeat("x", i%300), ModTime: time.Unix(1<<33, 1)}
	}
	files[70].Path = strings.Repeat("y", maxPath)
	n := FitFiles(files)
	b, err := marshal(nil, &ListReply{Entries: files[:n], Next: strings.Repeat("n", maxPath)})
	if err != nil || len(b) > MaxPayload || n < 200 {
		t.Errorf("%d entries take %d bytes, %v", n, len(b), err)
	}
	files[3].Path += "too long" + strings.Repeat("y", maxPath)
	if n := FitFiles(files); n != 3 {
		t.Errorf("%d entries fit, with one that can not be sent", n)
	}
	if n := FitExecs([]ExecInfo{{ID: "a"}}); n != 1 {
		t.Errorf("%d execs fit", n)
	}
}

type nesting struct{ inner StatRequest }

func (m *nesting) visit(c *visitor) { c.nested(&m.inner) }

// grown is a message after it got a new field.
type grown struct {
	old uint64
	new bool
}

func (m *grown) visit(c *visitor) {
	c.u64(&m.old)
	if c.since(2) {
		c.bool(&m.new)
	}
}

func TestOlderPeerLeavesFieldsOut(t *testing.T) {
	e := codec.NewEncoder(nil)
	e.Version(1)
	e.Uvarint(5)
	var m grown
	if err := unmarshal(e.Bytes(), &m); err != nil || m.old != 5 || m.new {
		t.Errorf("got %+v, %v", m, err)
	}
}

func FuzzMessages(f *testing.F) {
	for i, m := range samples() {
		b, err := marshal(nil, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(byte(i), b)
	}
	kinds := samples()
	renewal := slices.IndexFunc(kinds, func(m message) bool { _, ok := m.(*RenewRequest); return ok })
	for _, b := range malformedRenewals {
		f.Add(byte(renewal), b)
	}
	f.Fuzz(func(t *testing.T, kind byte, in []byte) {
		if len(in) > MaxPayload {
			return
		}
		m := fresh(kinds[int(kind)%len(kinds)])
		if unmarshal(in, m) != nil {
			return
		}
		b, err := marshal(nil, m)
		if err != nil {
			t.Fatalf("decoded %+v, which can not be encoded: %v", m, err)
		}
		again := fresh(m)
		if err := unmarshal(b, again); err != nil {
			t.Fatalf("encoded %+v, which can not be decoded: %v", m, err)
		}
		if !reflect.DeepEqual(m, again) {
			t.Fatalf("%+v became %+v", m, again)
		}
	})
}

// fixedConn is a peer that sends fixed bytes, whatever it receives. The bytes after
// its hello come once ready is closed.
type fixedConn struct {
	hello, rest io.Reader
	ready       chan struct{}
	written     atomic.Int64
}

func newFixedConn(in []byte) *fixedConn {
	n := len(magic) + 2
	if len(in) > n {
		n += int(binary.LittleEndian.Uint16(in[len(magic):]))
	}
	n = min(n, len(in))
	return &fixedConn{hello: bytes.NewReader(in[:n]), rest: bytes.NewReader(in[n:]), ready: make(chan struct{})}
}

func (c *fixedConn) Read(p []byte) (int, error) {
	if n, err := c.hello.Read(p); err == nil {
		return n, nil
	}
	if c.rest.(*bytes.Reader).Len() == 0 && c.written.Load() < 100 {
		return 0, io.EOF // in the middle of the hello, or right after it
	}
	<-c.ready
	return c.rest.Read(p)
}

func (c *fixedConn) Write(p []byte) (int, error) { c.written.Add(int64(len(p))); return len(p), nil }
func (c *fixedConn) Close() error                { return nil }

// fuzzServer serves a host that sends conn's bytes.
func fuzzServer(conn *fixedConn) {
	g := newFakeGuest()
	g.put("f", strings.Repeat("x", 100<<10))
	close(conn.ready)
	_ = Serve(context.Background(), conn, g)
	g.killAll()
}

// fuzzClient opens streams 1 to 15 and lets the guest answer.
func fuzzClient(conn *fixedConn) {
	c, err := Dial(conn)
	if err != nil {
		return
	}
	defer c.Close()
	ctx := context.Background()
	var streams []*stream
	for _, call := range []struct {
		m   Method
		req message
	}{
		{MethodExec, &ExecRequest{Argv: []string{"x"}}}, {MethodRead, &ReadRequest{}}, {MethodWrite, &WriteRequest{}},
		{MethodListExecs, &ListExecsRequest{}}, {MethodWatch, &WatchRequest{}},
		{MethodRenew, &RenewRequest{}}, {MethodCodeRun, &CodeRunRequest{}}, {MethodConnect, &ConnectRequest{Port: 80}},
	} {
		st, err := c.open(ctx, call.m, call.req)
		if err != nil {
			close(conn.ready)
			return
		}
		streams = append(streams, st)
	}
	close(conn.ready)
	var wg sync.WaitGroup
	wg.Go(func() { _ = c.Ping(ctx) })
	wg.Go(func() {
		x := &AttachedExec{c: c, st: streams[0], stdout: execReader{st: streams[0], channel: Stdout}, stderr: execReader{st: streams[0], channel: Stderr}}
		_, _ = x.drain(nil, nil)
	})
	wg.Go(func() { _, _ = io.Copy(io.Discard, &FileReader{st: streams[1]}) })
	wg.Go(func() {
		w := &FileWriter{st: streams[2]}
		_, _ = w.Write(make([]byte, 100<<10))
		_ = w.Close()
	})
	wg.Go(func() { _ = streams[3].result(&ListExecsReply{}) })
	wg.Go(func() {
		w := &Watcher{st: streams[4]}
		for {
			if _, err := w.Next(); err != nil {
				return
			}
		}
	})
	wg.Go(func() { _ = streams[5].result(&RenewReply{}) })
	wg.Go(func() {
		if x, err := newAttachedCode(streams[6]); err == nil {
			_, _ = x.Copy(nil, nil, nil)
		}
	})
	wg.Go(func() {
		p := &PortConn{streams[7]}
		_, _ = io.Copy(io.Discard, p)
		_, _ = p.Write(make([]byte, 100<<10))
		_ = p.CloseWrite()
	})
	wg.Wait()
}

func FuzzSession(f *testing.F) {
	for _, tt := range hostileFrames {
		f.Add(false, concat(testHello(), tt.in))
	}
	for _, tt := range hostileHellos {
		f.Add(false, tt.in)
		f.Add(true, tt.in)
	}
	for _, tt := range hostileAnswers {
		f.Add(true, concat(testHello(), tt.in))
	}
	f.Add(false, concat(testHello(), openFrame(1, MethodRenew, renewal(1)), openFrame(3, MethodRenew, renewal(1))))
	for _, b := range malformedRenewals {
		f.Add(false, concat(testHello(), frame(frameOpen, 0, 1, append([]byte{byte(MethodRenew)}, b...)...)))
	}
	for _, b := range malformedRenewReplies {
		f.Add(true, concat(testHello(), frame(frameReply, 0, 11, b...)))
	}
	f.Add(false, concat(testHello(), openFrame(1, MethodConnect, &ConnectRequest{Port: 8080}), frame(frameData, Stdin, 1, 1, 2), frame(frameEOF, Stdin, 1)))
	f.Add(true, concat(testHello(), frame(frameHeaders, 0, 15, 1), frame(frameData, Stdout, 15, 1, 2), frame(frameEOF, Stdout, 15)))
	f.Fuzz(func(t *testing.T, toClient bool, in []byte) {
		conn := newFixedConn(in)
		if toClient {
			fuzzClient(conn)
		} else {
			fuzzServer(conn)
		}
		if n, limit := conn.written.Load(), int64(1<<20+100*len(in)); n > limit {
			t.Fatalf("answered %d bytes with %d", len(in), n)
		}
	})
}
