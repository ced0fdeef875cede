package bench

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// LoadCommand is the argument with which a program that measures the network is
// started again, in a sandbox or beside it, as the client of its server. The program
// must then call ServeLoad with the next argument.
const LoadCommand = "bench-load"

// The kinds of loads of a client.
const (
	loadUp      = "up"      // sends
	loadDown    = "down"    // receives
	loadEcho    = "echo"    // waits for the answer to each byte, one after the other
	loadConnect = "connect" // opens connections, one after the other, and closes them
)

// load describes the work of a client.
type load struct {
	Server string `json:"server"`
	What   string `json:"what"`
	// Connections are open at once while bytes are sent or received for For.
	Connections int           `json:"connections,omitempty"`
	For         time.Duration `json:"for,omitempty"`
	// Count is how many bytes are echoed, or connections opened.
	Count int `json:"count,omitempty"`
}

// loaded is the result of a load.
type loaded struct {
	// Bytes have arrived. The last arrived Took after the connections were open.
	Bytes uint64        `json:"bytes"`
	Took  time.Duration `json:"took"`
	// CPU is the client's processor time meanwhile, as counted by the kernel that it
	// runs on.
	CPU time.Duration `json:"cpu"`
	// Samples are the durations of echoes or of opening connections.
	Samples []time.Duration `json:"samples,omitempty"`
	// Failed says why the load failed.
	Failed string `json:"failed,omitempty"`
}

// loadBegins is the line that a client writes once its connections are open. The next
// line is the last, a loaded in JSON.
const loadBegins = "begin"

// loadBuffer is how many bytes are sent or received at a time.
const loadBuffer = 128 << 10

// ServeLoad is the process of a client. argument is a load in JSON.
func ServeLoad(ctx context.Context, argument string, out io.Writer) error {
	var l load
	if err := json.Unmarshal([]byte(argument), &l); err != nil {
		return fmt.Errorf("%s %q: %w", LoadCommand, argument, err)
	}
	begin := func() error {
		_, err := fmt.Fprintln(out, loadBegins)
		return err
	}
	result, err := l.run(ctx, begin)
	if err != nil {
		result = loaded{Failed: fmt.Sprintf("%s: %v", l.What, err)}
	}
	return json.NewEncoder(out).Encode(result)
}

func (l load) run(ctx context.Context, begin func() error) (loaded, error) {
	switch l.What {
	case loadUp, loadDown:
		return l.move(ctx, begin)
	case loadEcho:
		return l.echo(ctx, begin)
	case loadConnect:
		return l.connect(ctx, begin)
	}
	return loaded{}, errors.New("not a load")
}

func (l load) dial(ctx context.Context) (*net.TCPConn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Server)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// head is the first message of a client: the kind of work on the connection.
type head [9]byte

func newHead(what string, d time.Duration) (h head) {
	h[0] = what[0]
	binary.LittleEndian.PutUint64(h[1:], uint64(d))
	return h
}

func (h head) what() byte         { return h[0] }
func (h head) For() time.Duration { return time.Duration(binary.LittleEndian.Uint64(h[1:])) }

// move sends or receives on all connections at once.
func (l load) move(ctx context.Context, begin func() error) (sum loaded, err error) {
	conns := make([]*net.TCPConn, l.Connections)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close() // its end was seen already
			}
		}
	}()
	for i := range conns {
		if conns[i], err = l.dial(ctx); err == nil {
			// Go turns Nagle's algorithm off, but programs that move many bytes leave
			// it on.
			err = conns[i].SetNoDelay(false)
		}
		if err != nil {
			return sum, fmt.Errorf("connection %d: %w", i, err)
		}
	}
	if err := begin(); err != nil {
		return sum, err
	}
	var all sync.WaitGroup
	bytes, errs := make([]uint64, len(conns)), make([]error, len(conns))
	start, used := time.Now(), ownCPU()
	for i, c := range conns {
		all.Go(func() {
			h := newHead(l.What, l.For)
			if _, errs[i] = c.Write(h[:]); errs[i] != nil {
				return
			}
			bytes[i], errs[i] = l.blocking(c)
		})
	}
	all.Wait()
	sum.Took, sum.CPU = time.Since(start), ownCPU()-used
	for _, n := range bytes {
		sum.Bytes += n
	}
	return sum, errors.Join(errs...)
}

// blocking moves bytes with blocking system calls, as most programs do. Go's own way
// first tries and then waits for the poller. It needs twice as many system calls, and
// in gVisor these dominate the cost.
func (l load) blocking(c *net.TCPConn) (uint64, error) {
	f, err := c.File()
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }() // c is still open
	fd := waiting(f.Fd())
	if l.What == loadDown {
		return receive(fd)
	}
	return sendCounted(c, fd, l.For)
}

// waiting is a socket whose system calls block.
type waiting int

func (fd waiting) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(int(fd), b)
		switch {
		case errors.Is(err, unix.EINTR):
		case n == 0 && err == nil:
			return 0, io.EOF
		default:
			return max(n, 0), err
		}
	}
}

func (fd waiting) Write(b []byte) (done int, err error) {
	for done < len(b) {
		n, err := unix.Write(int(fd), b[done:])
		done += max(n, 0)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return done, err
		}
	}
	return done, nil
}

// ownCPU is the processor time that this process has used so far.
func ownCPU() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err) // its arguments are valid
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// sendCounted sends for d, and returns the receiver's count.
func sendCounted(c *net.TCPConn, fd waiting, d time.Duration) (uint64, error) {
	sent, err := send(fd, d)
	if err != nil {
		return 0, err
	}
	if err := c.CloseWrite(); err != nil {
		return 0, err
	}
	var arrived [8]byte
	if _, err := io.ReadFull(fd, arrived[:]); err != nil {
		return 0, fmt.Errorf("hear what has arrived: %w", err)
	}
	if n := binary.LittleEndian.Uint64(arrived[:]); n != sent {
		return 0, fmt.Errorf("of %d bytes %d have arrived", sent, n)
	}
	return sent, nil
}

func send(c io.Writer, d time.Duration) (sent uint64, err error) {
	b := make([]byte, loadBuffer)
	for end := time.Now().Add(d); time.Now().Before(end); {
		n, err := c.Write(b)
		sent += uint64(n)
		if err != nil {
			return sent, err
		}
	}
	return sent, nil
}

// receive counts the received bytes.
func receive(c io.Reader) (received uint64, err error) {
	b := make([]byte, loadBuffer)
	for {
		n, err := c.Read(b)
		received += uint64(n)
		if errors.Is(err, io.EOF) {
			return received, nil
		}
		if err != nil {
			return received, err
		}
	}
}

func (l load) echo(ctx context.Context, begin func() error) (r loaded, err error) {
	c, err := l.dial(ctx)
	if err != nil {
		return r, err
	}
	defer func() { _ = c.Close() }() // no call is under way
	h := newHead(loadEcho, 0)
	if _, err := c.Write(h[:]); err != nil {
		return r, err
	}
	if err := begin(); err != nil {
		return r, err
	}
	var b [1]byte
	r.Samples, err = repeat(nil, l.Count, func() error {
		if _, err := c.Write(b[:]); err != nil {
			return err
		}
		_, err := io.ReadFull(c, b[:])
		return err
	})
	return r, err
}

func (l load) connect(ctx context.Context, begin func() error) (r loaded, err error) {
	if err := begin(); err != nil {
		return r, err
	}
	for range l.Count {
		start := time.Now()
		c, err := l.dial(ctx)
		if err != nil {
			return r, err
		}
		r.Samples = append(r.Samples, time.Since(start))
		if err := c.Close(); err != nil {
			return r, err
		}
	}
	return r, nil
}

// loadServer is the server that clients connect to.
type loadServer struct {
	l    net.Listener
	done chan struct{}
}

func newLoadServer(ctx context.Context, address string) (*loadServer, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	s := &loadServer{l, make(chan struct{})}
	go s.accept()
	return s, nil
}

func (s *loadServer) address() string { return s.l.Addr().String() }

// accept serves until the listener is closed. If a connection fails, it also fails at
// the client, which reports it.
func (s *loadServer) accept() {
	defer close(s.done)
	var all sync.WaitGroup
	defer all.Wait()
	for {
		c, err := s.l.Accept()
		if err != nil {
			return
		}
		all.Go(func() {
			defer func() { _ = c.Close() }()
			_ = serveLoaded(c.(*net.TCPConn))
		})
	}
}

func serveLoaded(c *net.TCPConn) error {
	var h head
	if _, err := io.ReadFull(c, h[:]); err != nil {
		return err
	}
	switch h.what() {
	case loadUp[0]:
		n, err := receive(c)
		if err != nil {
			return err
		}
		_, err = c.Write(binary.LittleEndian.AppendUint64(nil, n))
		return err
	case loadDown[0]:
		_, err := send(c, h.For())
		return err
	case loadEcho[0]:
		var b [1]byte
		for {
			if _, err := io.ReadFull(c, b[:]); err != nil {
				return err
			}
			if _, err := c.Write(b[:]); err != nil {
				return err
			}
		}
	}
	return errors.New("not a load")
}

// close returns once all connections have ended; their clients have ended already.
func (s *loadServer) close() error {
	err := s.l.Close()
	<-s.done
	return err
}
