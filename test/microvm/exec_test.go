package microvm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

func TestBoot(t *testing.T) {
	forEachSMP(t, func(t *testing.T, vcpus int) {
		g := boot(t, vcpus)
		if err := g.Agent().Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		info, err := g.Agent().Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if info.Hostname != "test" {
			t.Errorf("hostname is %q, want test", info.Hostname)
		}
		if got := g.sh(t, "nproc"); got != strconv.Itoa(vcpus) {
			t.Errorf("nproc says %s, want %d", got, vcpus)
		}
		if got := g.sh(t, "cat /proc/1/comm"); got != "init" {
			t.Errorf("process 1 is %q, want our agent, init", got)
		}
		// Programs expect these to exist without an installation.
		g.sh(t, "test -d /proc/self && test -d /sys/class && test -c /dev/null && test -d /dev/pts && test -w /dev/shm && test -w /tmp")
		g.sh(t, "ifconfig lo | grep -q 127.0.0.1 && ping -c1 -W5 127.0.0.1")
		g.sh(t, "echo written > /etc/written && cat /etc/written")
		// Only the agent's own memory has a fixed layout.
		stack := func() string { return g.sh(t, "grep '\\[stack\\]' /proc/self/maps") }
		if a, b, c := stack(), stack(), stack(); a == b && b == c {
			t.Errorf("programs have their stack at one place: %s", a)
		}
	})
}

func TestExecOptions(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		g := boot(t, vcpus)
		for _, c := range []struct {
			name  string
			req   guestrpc.ExecRequest
			stdin string
			want  result
		}{
			{
				name: "arguments are not a shell's",
				req:  guestrpc.ExecRequest{Argv: []string{"printf", "%s|", "a b", "$HOME", "", "*"}},
				want: result{stdout: "a b|$HOME||*|"},
			},
			{
				name: "streams are apart",
				req:  shell("echo out; echo err >&2"),
				want: result{stdout: "out\n", stderr: "err\n"},
			},
			{
				name: "environment",
				req:  guestrpc.ExecRequest{CleanEnv: true, Argv: []string{"/bin/sh", "-c", `echo "$A-$B-${PATH:+path}"`}, Env: []string{"A=1", "B=two words", "PATH=/bin"}},
				want: result{stdout: "1-two words-path\n"},
			},
			{
				name: "working folder",
				req:  guestrpc.ExecRequest{Argv: []string{"pwd"}, Workdir: "/proc/sys"},
				want: result{stdout: "/proc/sys\n"},
			},
			{
				name: "user by name",
				req:  guestrpc.ExecRequest{Argv: []string{"sh", "-c", "id -u; id -g; echo $HOME"}, User: "user"},
				want: result{stdout: "1000\n1000\n/home/user\n"},
			},
			{
				name: "user by number",
				req:  guestrpc.ExecRequest{Argv: []string{"sh", "-c", "id -u; id -g"}, User: "4242:77", Workdir: "/"},
				want: result{stdout: "4242\n77\n"},
			},
			{name: "stdin", req: shell("cat; echo end"), stdin: "line 1\nline 2", want: result{stdout: "line 1\nline 2end\n"}},
			{name: "no stdin", req: shell("wc -c"), want: result{stdout: "0\n"}},
			{name: "exit code", req: shell("exit 37"), want: result{status: guestrpc.ExitStatus{Code: 37}}},
			{name: "signal", req: shell("kill -TERM $$"), want: result{status: guestrpc.ExitStatus{Code: 128 + 15, Signal: 15}}},
			{
				name: "timeout ends the children too",
				req: func() guestrpc.ExecRequest {
					r := shell("sleep 1000 & sleep 1000")
					r.Timeout = 200 * time.Millisecond
					return r
				}(),
				want: result{status: guestrpc.ExitStatus{Code: 128 + 9, Signal: 9, TimedOut: true}},
			},
		} {
			t.Run(c.name, func(t *testing.T) {
				r := g.run(t, c.req, c.stdin)
				if r.stdout != c.want.stdout || r.stderr != c.want.stderr {
					t.Errorf("stdout %q, stderr %q; want %q, %q", r.stdout, r.stderr, c.want.stdout, c.want.stderr)
				}
				w := c.want.status
				if r.status.Code != w.Code || r.status.Signal != w.Signal || r.status.TimedOut != w.TimedOut {
					t.Errorf("status %+v, want %+v", r.status, w)
				}
			})
		}
		if left := g.sh(t, "ps -o comm | grep -c '^sleep' || true"); left != "0" {
			t.Errorf("%s sleeps are left after their timeout", left)
		}
		t.Run("not found", func(t *testing.T) {
			_, err := g.Agent().Exec(t.Context(), guestrpc.ExecRequest{Argv: []string{"no-such-program"}})
			var e *guestrpc.Error
			if !errors.As(err, &e) || e.Code != guestrpc.CodeNotFound || !strings.Contains(e.Message, "no-such-program") {
				t.Fatalf("error %v does not name what was not found", err)
			}
		})
	})
}

func shell(script string) guestrpc.ExecRequest {
	return guestrpc.ExecRequest{Argv: []string{"sh", "-c", script}}
}

// TestKill kills a process group, and then a whole session whose members ignore
// the signals that can be ignored.
func TestKill(t *testing.T) {
	g := boot(t, 2)
	x, err := g.Agent().Exec(t.Context(), shell("trap '' TERM; sleep 1000 & echo started; wait"))
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, x.Stdout(), "started")
	if err := x.Signal(t.Context(), int(unix.SIGKILL), guestrpc.ScopeGroup); err != nil {
		t.Fatal(err)
	}
	status, err := x.Wait()
	if err != nil || status.Signal != int32(unix.SIGKILL) {
		t.Fatalf("status %+v, %v; want killed", status, err)
	}
	if left := g.sh(t, "ps -o comm | grep -c '^sleep' || true"); left != "0" {
		t.Errorf("%s sleeps survived the kill of their group", left)
	}
}

// waitFor reads until the text has arrived.
func waitFor(t *testing.T, r io.Reader, text string) string {
	t.Helper()
	var seen bytes.Buffer
	buf := make([]byte, 4096)
	for !strings.Contains(seen.String(), text) {
		n, err := r.Read(buf)
		seen.Write(buf[:n])
		if err != nil {
			t.Fatalf("waiting for %q: %v after %q", text, err, seen.String())
		}
	}
	return seen.String()
}

func TestTerminal(t *testing.T) {
	g := boot(t, 1)
	req := shell("stty size; while read line; do stty size; echo got $line; done")
	req.TTY, req.Rows, req.Cols, req.Stdin = true, 40, 100, true
	x, err := g.Agent().Exec(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, x.Stdout(), "40 100")
	if err := x.Resize(t.Context(), 50, 120); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(x.Stdin(), "hello\n"); err != nil {
		t.Fatal(err)
	}
	if seen := waitFor(t, x.Stdout(), "got hello"); !strings.Contains(seen, "50 120") {
		t.Fatalf("the terminal says %q after the resize", seen)
	}
	if _, err := io.WriteString(x.Stdin(), "\x04"); err != nil { // end of file
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, x.Stdout()); err != nil {
		t.Fatal(err)
	}
	if status, err := x.Wait(); err != nil || status.Code != 0 {
		t.Fatalf("status %+v, %v", status, err)
	}
}

// bulkScript prints n MiB: 64 numbered lines of 64 bytes, doubled to 1 MiB, n
// times.
const bulkScript = `cd /tmp; i=0; while [ $i -lt 64 ]; do printf '%%064d' $i; i=$((i+1)); done > a
i=0; while [ $i -lt 8 ]; do cat a a > b; mv b a; i=$((i+1)); done
n=%d; while [ $n -gt 0 ]; do cat a; n=$((n-1)); done`

// TestBulk moves 100 MiB out through stdout, and in and out through a file,
// with checksums on both sides.
func TestBulk(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		g := boot(t, vcpus, func(s *engine.Spec) { s.Memory = 512 * mib })
		size := int64(soak.Count(100, 16)) * mib
		t.Run("stdout", func(t *testing.T) {
			h := sha256.New()
			n := &counter{w: h}
			status, err := g.Agent().Run(t.Context(), shell(fmt.Sprintf(bulkScript, size/mib)), nil, n, nil)
			if err != nil || status.Code != 0 {
				t.Fatalf("status %+v, %v", status, err)
			}
			want := sha256.New()
			var seed bytes.Buffer
			for i := range 64 {
				fmt.Fprintf(&seed, "%064d", i)
			}
			for range size / 4096 {
				want.Write(seed.Bytes())
			}
			if n.n != size || !bytes.Equal(h.Sum(nil), want.Sum(nil)) {
				t.Fatalf("%d bytes with digest %x, want %d with %x", n.n, h.Sum(nil), size, want.Sum(nil))
			}
		})
		t.Run("file", func(t *testing.T) {
			source := io.LimitReader(&pattern{}, size)
			want := sha256.New()
			reply, err := g.Agent().WriteFile(t.Context(), guestrpc.WriteRequest{Path: "/tmp/bulk", Perm: 0o600}, io.TeeReader(source, want))
			if err != nil || reply.Size != size {
				t.Fatalf("wrote %+v, %v; want %d bytes", reply, err, size)
			}
			sum := fmt.Sprintf("%x", want.Sum(nil))
			if got, _, _ := strings.Cut(g.sh(t, "sha256sum /tmp/bulk"), " "); got != sum {
				t.Fatalf("the guest has digest %s, want %s", got, sum)
			}
			r, err := g.Agent().OpenRead(t.Context(), guestrpc.ReadRequest{Path: "/tmp/bulk"})
			if err != nil {
				t.Fatal(err)
			}
			back := sha256.New()
			if _, err := io.Copy(back, r); err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprintf("%x", back.Sum(nil)); got != sum {
				t.Fatalf("read back digest %s, want %s", got, sum)
			}
		})
	})
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// pattern is a stream of bytes whose pages all differ.
type pattern struct{ state uint64 }

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		p.state = p.state*6364136223846793005 + 1442695040888963407
		b[i] = byte(p.state >> 56)
	}
	return len(b), nil
}

func TestConcurrentExecs(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		g := boot(t, vcpus)
		const n = 50
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				r := g.run(t, shell(fmt.Sprintf("cat; echo to-stderr-%d >&2; exit %d", i, i)), fmt.Sprintf("input %d", i))
				if r.stdout != fmt.Sprintf("input %d", i) || r.stderr != fmt.Sprintf("to-stderr-%d\n", i) || r.status.Code != int32(i) {
					t.Errorf("exec %d: %+v", i, r)
				}
			})
		}
		wg.Wait()
	})
}

// TestStalledReader: a process whose output is not read delays neither other
// processes nor the agent.
func TestStalledReader(t *testing.T) {
	soakEachSMP(t, func(t *testing.T, vcpus int) {
		g := boot(t, vcpus)
		x, err := g.Agent().Exec(t.Context(), shell("cat /dev/zero"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			if err := g.Agent().Ping(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := g.sh(t, "echo %d", i); got != strconv.Itoa(i) {
				t.Fatalf("beside a stalled stream: %q", got)
			}
		}
		if err := x.Signal(t.Context(), int(unix.SIGKILL), guestrpc.ScopeProcess); err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, x.Stdout()); err != nil || n == 0 {
			t.Fatalf("%d bytes read after the stall, %v", n, err)
		}
	})
}

// TestReconnect: an exec outlives its connection and can be found by its id.
func TestReconnect(t *testing.T) {
	g := boot(t, 1)
	req := shell("echo first; read line; echo second $line; exit 9")
	req.ID, req.Stdin = "survivor", true
	x, err := g.Agent().Exec(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, x.Stdout(), "first")
	stdoutAt, stderrAt := x.Offsets()
	if err := g.Agent().Close(); err != nil {
		t.Fatal(err)
	}
	again := dial(t, g)
	y, err := again.Attach(t.Context(), guestrpc.AttachRequest{ID: "survivor", StdoutOffset: stdoutAt, StderrOffset: stderrAt})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(y.Stdin(), "hello\n"); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(y.Stdout())
	if err != nil || string(rest) != "second hello\n" {
		t.Fatalf("after the reconnect: %q, %v", rest, err)
	}
	if status, err := y.Wait(); err != nil || status.Code != 9 {
		t.Fatalf("status %+v, %v", status, err)
	}
}

// dial opens another session with a guest's agent.
func dial(t *testing.T, g *testGuest) *guestrpc.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := g.Dial(ctx, guestrpc.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	c, err := guestrpc.NewClient(ctx, conn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}
