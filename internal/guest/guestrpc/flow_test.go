package guestrpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
)

// bulkGuest moves bytes without keeping them.
type bulkGuest struct {
	*fakeGuest
	size    int64
	reading chan struct{} // closed when a stuck Write has begun
}

// noise is a stream of bytes that does not repeat within a transfer. It must be read
// in multiples of 8.
type noise struct{ state uint64 }

func (r *noise) Read(p []byte) (int, error) {
	n := len(p) &^ 7
	for i := 0; i < n; i += 8 {
		r.state = r.state*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(p[i:], r.state)
	}
	return n, nil
}

func (g *bulkGuest) Read(_ context.Context, req *ReadRequest, s *ReadStream) error {
	if err := s.Opened(FileInfo{Size: g.size}); err != nil {
		return err
	}
	_, err := io.CopyBuffer(s, io.LimitReader(&noise{}, g.size), make([]byte, 32<<10))
	return err
}

func (g *bulkGuest) Write(ctx context.Context, req *WriteRequest, r io.Reader) (WriteReply, error) {
	if req.Path == "stuck" {
		close(g.reading)
		<-ctx.Done()
		return WriteReply{}, ctx.Err()
	}
	h := crc32.NewIEEE()
	n, err := io.CopyBuffer(h, r, make([]byte, 32<<10))
	// The checksum is returned in place of the size.
	return WriteReply{Written: n, Size: int64(h.Sum32())}, err
}

// heapGrowth runs f and returns the maximum growth of the live heap, which f samples
// by calling its argument.
func heapGrowth(f func(sample func())) uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before, peak := m.HeapAlloc, m.HeapAlloc
	f(func() {
		runtime.ReadMemStats(&m)
		peak = max(peak, m.HeapAlloc)
	})
	return peak - before
}

// sampler calls f once per MiB.
type sampler struct {
	io.Writer
	n int
	f func()
}

func (s *sampler) Write(p []byte) (int, error) {
	if s.n += len(p); s.n >= 1<<20 {
		s.n = 0
		s.f()
	}
	return s.Writer.Write(p)
}

func TestBulkTransfer(t *testing.T) {
	const size = 100 << 20
	// The limit covers windows, buffers, and garbage that was not collected yet.
	const limit = 8 << 20
	c := start(t, &bulkGuest{fakeGuest: newFakeGuest(), size: size})
	ctx := testContext(t)
	sum := crc32.NewIEEE()
	io.CopyN(sum, &noise{}, size)

	grown := heapGrowth(func(sample func()) {
		r, err := c.OpenRead(ctx, ReadRequest{Path: "x"})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got := crc32.NewIEEE()
		n, err := io.CopyBuffer(&sampler{Writer: got, f: sample}, onlyReader{r}, make([]byte, 64<<10))
		if err != nil || n != size || got.Sum32() != sum.Sum32() {
			t.Errorf("read %d bytes, crc %x, want %x: %v", n, got.Sum32(), sum.Sum32(), err)
		}
	})
	t.Logf("read: heap grew by %d KiB", grown>>10)
	if grown > limit {
		t.Errorf("reading: heap grew by %d KiB", grown>>10)
	}

	grown = heapGrowth(func(sample func()) {
		src := io.TeeReader(io.LimitReader(&noise{}, size), &sampler{Writer: io.Discard, f: sample})
		reply, err := c.WriteFile(ctx, WriteRequest{Path: "x"}, src)
		if err != nil || reply.Written != size || uint32(reply.Size) != sum.Sum32() {
			t.Errorf("wrote %+v, want crc %x: %v", reply, sum.Sum32(), err)
		}
	})
	t.Logf("write: heap grew by %d KiB", grown>>10)
	if grown > limit {
		t.Errorf("writing: heap grew by %d KiB", grown>>10)
	}
}

func TestStalledStreamsDelayNobody(t *testing.T) {
	g := &bulkGuest{fakeGuest: newFakeGuest(), size: 1 << 40, reading: make(chan struct{})}
	c := start(t, g)
	ctx := testContext(t)

	// A download that is not read, and an upload that the guest does not read.
	r, err := c.OpenRead(ctx, ReadRequest{Path: "endless"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	w, err := c.OpenWrite(ctx, WriteRequest{Path: "stuck"})
	if err != nil {
		t.Fatal(err)
	}
	stalled := make(chan error, 1)
	go func() {
		_, err := w.Write(make([]byte, 1<<20))
		stalled <- err
	}()
	<-g.reading
	// Both are blocked once their windows are used up. The other calls need not wait
	// for that.
	for range 20 {
		var out bytes.Buffer
		in := strings.Repeat("x", 300<<10)
		if _, err := c.Run(ctx, ExecRequest{Argv: []string{"cat"}}, strings.NewReader(in), &out, nil); err != nil || out.Len() != len(in) {
			t.Fatalf("cat: %d bytes, %v", out.Len(), err)
		}
		if err := c.Ping(ctx); err != nil {
			t.Fatal(err)
		}
	}
	r.st.mu.Lock()
	held := len(r.st.in[Stdout].buf)
	r.st.mu.Unlock()
	if held > clientWindow {
		t.Errorf("a stalled stream holds %d bytes", held)
	}
	w.Abort()
	if err := <-stalled; !errors.Is(err, ErrClosed) {
		t.Errorf("stalled write: %v", err)
	}
}

func TestConcurrentStreams(t *testing.T) {
	c := start(t, newFakeGuest())
	ctx := testContext(t)
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			in := strings.Repeat(strconv.Itoa(i)+" ", 40_000)
			var out bytes.Buffer
			exit, err := c.Run(ctx, ExecRequest{ID: strconv.Itoa(i), Argv: []string{"cat"}}, strings.NewReader(in), &out, nil)
			if err != nil || exit.Code != 0 || out.String() != in {
				t.Errorf("stream %d: %d of %d bytes, %+v, %v", i, out.Len(), len(in), exit, err)
			}
		})
	}
	wg.Wait()
}

func TestConnectionLossAndAttach(t *testing.T) {
	g := newFakeGuest()
	host, guest := socketPair(t)
	go Serve(context.Background(), guest, g)
	c, err := Dial(host)
	if err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	x, err := c.Exec(ctx, ExecRequest{ID: "cat", Argv: []string{"cat"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(x.Stdin(), "first ")
	buf := make([]byte, 3)
	if _, err := io.ReadFull(x.Stdout(), buf); err != nil {
		t.Fatal(err)
	}
	host.Close()
	_, err = x.Wait()
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeUnavailable {
		t.Errorf("wait: %v", err)
	}

	c = start(t, g)
	stdout, stderr := x.Offsets()
	y, err := c.Attach(ctx, AttachRequest{ID: x.ID(), StdoutOffset: stdout, StderrOffset: stderr})
	if err != nil {
		t.Fatal(err)
	}
	if y.Started().Stdout.Offset != 3 {
		t.Errorf("started %+v", y.Started())
	}
	io.WriteString(y.Stdin(), "second")
	y.Stdin().Close()
	rest, err := io.ReadAll(y.Stdout())
	if err != nil || string(buf)+string(rest) != "first second" {
		t.Errorf("%q then %q, %v", buf, rest, err)
	}
	if exit, err := y.Wait(); err != nil || exit.Code != 0 {
		t.Errorf("exit %+v, %v", exit, err)
	}
	if _, err := c.Attach(ctx, AttachRequest{ID: "none"}); err == nil {
		t.Error("attached to nothing")
	}
}

func TestCancelResetsOnlyItsStream(t *testing.T) {
	g := newFakeGuest()
	g.block = make(chan struct{})
	c := start(t, g)
	ctx, cancel := context.WithCancel(testContext(t))
	failed := make(chan error)
	go func() { failed <- c.Sync(ctx) }()
	<-g.blocked
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := c.Ping(testContext(t)); err != nil {
		t.Error(err)
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if n := len(c.s.streams); n != 0 {
		t.Errorf("%d streams left", n)
	}
}

func TestStreamLimit(t *testing.T) {
	g := newFakeGuest()
	g.block = make(chan struct{})
	c := start(t, g)
	ctx := testContext(t)
	results := make(chan error, MaxStreams)
	for range MaxStreams {
		go func() { results <- c.Sync(ctx) }()
	}
	for range MaxStreams {
		<-g.blocked
	}
	var e *Error
	if err := c.Sync(ctx); !errors.As(err, &e) || e.Code != CodeResourceExhausted {
		t.Errorf("one more call: %v", err)
	}
	close(g.block)
	for range MaxStreams {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	// A finished call no longer counts once its reply has arrived.
	for range 2 * MaxStreams {
		if err := c.Sync(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// deafGuest completes the handshake and then reads no frames.
func deafGuest(t *testing.T) *Client {
	host, guest := socketPair(t)
	go func() {
		readHello(newFrameReader(guest))
		h := hello{minVersion: 1, maxVersion: 1, maxPayload: MaxPayload, window: maxWindow}
		guest.Write(h.append(nil))
	}()
	c, err := Dial(host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestContextEndsCallsToADeafGuest(t *testing.T) {
	c := deafGuest(t)
	ctx, cancel := context.WithCancel(testContext(t))
	w, err := c.OpenWrite(ctx, WriteRequest{Path: "x"})
	if err != nil {
		t.Fatal(err)
	}
	errs := make(chan error)
	go func() {
		_, err := w.Write(make([]byte, maxWindow)) // much more than a socket holds
		errs <- err
	}()
	go func() { errs <- c.Ping(ctx) }()
	go func() { errs <- c.Sync(ctx) }()
	cancel()
	for range 3 {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	if c.Err() != nil {
		t.Errorf("session ended: %v", c.Err())
	}
}

// TestUnbufferedTransport moves data both ways at once over a transport without
// buffers. There, any wait of a read loop for a write would be a deadlock, which
// synctest detects.
func TestUnbufferedTransport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host, guest := net.Pipe()
		served := make(chan error, 1)
		go func() { served <- Serve(context.Background(), guest, newFakeGuest()) }()
		c, err := Dial(host)
		if err != nil {
			t.Fatal(err)
		}
		ctx := context.Background()
		in := strings.Repeat("0123456789", 200_000)
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				var out bytes.Buffer
				if _, err := c.Run(ctx, ExecRequest{ID: strconv.Itoa(i), Argv: []string{"cat"}}, strings.NewReader(in), &out, nil); err != nil || out.String() != in {
					t.Errorf("%d bytes, %v", out.Len(), err)
				}
			})
			wg.Go(func() {
				for range 50 {
					if err := c.Ping(ctx); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		c.Close()
		if err := <-served; err != nil && !errors.Is(err, io.ErrClosedPipe) {
			t.Error(err)
		}
	})
}

func TestServeEndsWithItsContext(t *testing.T) {
	g := newFakeGuest()
	g.block = make(chan struct{})
	host, guest := socketPair(t)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- Serve(ctx, guest, g) }()
	c, err := Dial(host)
	if err != nil {
		t.Fatal(err)
	}
	call := make(chan error, 1)
	go func() { call <- c.Sync(testContext(t)) }()
	<-g.blocked
	cancel()
	if err := <-served; !errors.Is(err, context.Canceled) {
		t.Errorf("Serve: %v", err)
	}
	if err := <-call; err == nil {
		t.Error("call outlived the session")
	}
}

func TestDialTimeout(t *testing.T) {
	host, _ := socketPair(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := NewClient(ctx, host); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
}

func TestServerAnswersPingWithoutAllocating(t *testing.T) {
	host, guest := socketPair(t)
	go Serve(context.Background(), guest, newFakeGuest())
	hi := hello{minVersion: 1, maxVersion: 1, maxPayload: MaxPayload, window: minWindow}
	host.Write(hi.append(nil))
	r := newFrameReader(host)
	if _, err := readHello(r); err != nil {
		t.Fatal(err)
	}
	ping := append(appendHeader(nil, header{typ: framePing, length: pingSize}), "12345678"...)
	allocs := testing.AllocsPerRun(200, func() {
		host.Write(ping)
		if h, p, err := r.next(); err != nil || h.typ != framePong || string(p) != "12345678" {
			t.Fatalf("%+v %q %v", h, p, err)
		}
	})
	if allocs >= 1 {
		t.Errorf("%v allocations for a ping", allocs)
	}
}
