package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestmux"
	"agentrun.dev/internal/guest/guestrpc"
)

// TestHostsClock: the host's clock is not set. A wrong clock is reported.
func TestHostsClock(t *testing.T) {
	if step, err := checkClock(time.Now()); step != 0 || err != nil {
		t.Errorf("the host's clock: %v, %v", step, err)
	}
	for _, off := range []time.Duration{-time.Hour, time.Hour} {
		if _, err := checkClock(time.Now().Add(off)); !errors.Is(err, ErrIO) {
			t.Errorf("a clock that is %v off: %v", off, err)
		}
	}
	if err := checkGenerator(nil); err != nil {
		t.Error(err)
	}
}

// TestContainerRenewer: neither the generator nor the clock is set, and the rest
// is renewed.
func TestContainerRenewer(t *testing.T) {
	r := NewContainerRenewer()
	r.root = t.TempDir()
	if err := os.MkdirAll(r.root+"/etc", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(r.root+"/run", 0o755); err != nil {
		t.Fatal(err)
	}
	name := ""
	r.setHostname = func(n string) error { name = n; return nil }
	r.random = "/nowhere"
	r.setClock = func(int32, *unix.Timespec) error { return errors.New("the clock was set") }
	req := guestrpc.RenewRequest{
		Entropy: make([]byte, guestrpc.MinEntropy), WallClock: time.Now(), Hostname: "fork",
		MachineID: strings.Repeat("ab", 16), Generation: 1,
	}
	reply, err := r.Renew(t.Context(), &req)
	if err != nil || reply.Generation != 1 || reply.ClockStep != 0 || name != "fork" {
		t.Errorf("%+v, %v, name %q", reply, err, name)
	}
	if b, err := os.ReadFile(r.root + "/etc/machine-id"); err != nil || string(b) != req.MachineID+"\n" {
		t.Errorf("machine id %q, %v", b, err)
	}
	req.Entropy, req.WallClock, req.Generation = make([]byte, guestrpc.MinEntropy), time.Now().Add(time.Hour), 2
	if _, err := r.Renew(t.Context(), &req); err == nil || r.Generation() != 1 {
		t.Errorf("with a wrong clock: %v, generation %d", err, r.Generation())
	}
}

// TestServeChannel: over one channel the host reaches the agent, more than once,
// and TCP ports of the loopback.
func TestServeChannel(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := NewConn(fds[1])
	if err != nil {
		t.Fatal(err)
	}
	ps := NewProcesses(Config{})
	t.Cleanup(ps.Close)
	served := make(chan error, 1)
	go func() { served <- (&Server{Processes: ps, Version: "test"}).ServeChannel(context.Background(), theirs) }()
	h := guestmux.NewHost(os.NewFile(uintptr(fds[0]), "channel"))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := h.Reset(ctx, 1); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s, err := h.Open(ctx, guestrpc.AgentPort)
		if err != nil {
			t.Fatal(err)
		}
		c, err := guestrpc.NewClient(ctx, s)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		var out bytes.Buffer
		if st, err := c.Run(ctx, guestrpc.ExecRequest{Argv: []string{"/bin/echo", "hello"}, Workdir: "/"}, nil, &out, nil); err != nil || st.Code != 0 || out.String() != "hello\n" {
			t.Errorf("%+v, %v, %q", st, err, out.Bytes())
		}
	}
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}()
		s, err := h.Open(ctx, uint32(l.Addr().(*net.TCPAddr).Port))
		if err != nil {
			t.Fatal(at, err)
		}
		sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		go func() {
			_, _ = s.Write(sent)
			_ = s.CloseWrite()
		}()
		if got, err := io.ReadAll(s); err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%s: %d of %d bytes, %v", at, len(got), len(sent), err)
		}
	}
	for _, port := range []uint32{0, 1, 70000} {
		if _, err := h.Open(ctx, port); err == nil {
			t.Errorf("port %d was connected", port)
		}
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if err := <-served; err == nil {
		t.Error("the channel ended without a reason")
	}
}

// TestParseContainer: invalid arguments are errors, because a sandbox that boots
// without a requested setting is worse than one that does not boot.
func TestParseContainer(t *testing.T) {
	got, err := ParseContainer([]string{"--dns=10.0.2.3", "--dns=9.9.9.9", "--dns=fd00:a9e7:0000:0000:0000:0000:0000:0001"})
	if err != nil || !slices.Equal(got, []string{"10.0.2.3", "9.9.9.9", "fd00:a9e7::1"}) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := ParseContainer(nil); err != nil || got != nil {
		t.Errorf("%v, %v", got, err)
	}
	const one = "--dns=1.2.3.4"
	for _, bad := range [][]string{{"--dns"}, {"--dns="}, {"--dns=0.0.0.0"}, {"--dns=1.2.3.4.5"}, {"--dns=::1"}, {"dns=1.2.3.4"}, {one, one, one, one}} {
		if got, err := ParseContainer(bad); err == nil {
			t.Errorf("%q became %v", bad, got)
		}
	}
}
