package agent

import (
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLargeOutput moves 100 MiB through a pipe of 64 KiB and a ring of 256.
func TestLargeOutput(t *testing.T) {
	block := make([]byte, 1<<20)
	rnd := rand.NewChaCha8([32]byte{1})
	rnd.Read(block)
	file := filepath.Join(t.TempDir(), "block")
	if err := os.WriteFile(file, block, 0o600); err != nil {
		t.Fatal(err)
	}
	want := sha256.New()
	for range 100 {
		want.Write(block)
	}
	ps := newProcesses(t, Config{})
	var before, after runtime.MemStats
	p := start(t, ps, ExecSpec{Argv: sh("read go; i=0; while [ $i -lt 100 ]; do cat " + file + "; i=$((i+1)); done"), Stdin: true})
	r := attach(t, p.Stdout(), 0)
	got := sha256.New()
	buf := make([]byte, 32<<10)
	total := int64(0)
	runtime.GC()
	runtime.ReadMemStats(&before)
	p.WriteStdin(nil, []byte("go\n"))
	for {
		n, err := r.Read(nil, buf)
		got.Write(buf[:n])
		total += int64(n)
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	runtime.ReadMemStats(&after)
	if total != 100<<20 || string(got.Sum(nil)) != string(want.Sum(nil)) {
		t.Errorf("%d bytes, checksum differs", total)
	}
	if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 2<<20 {
		t.Errorf("%d bytes allocated on the way", allocated)
	}
	if e := wait(t, p); e.Stdout.Dropped != 0 || e.Stdout.Bytes != 100<<20 || e.Stdout.Start != 100<<20-256<<10 {
		t.Errorf("counted as %+v", e.Stdout)
	}
}

// pattern prints bytes that reveal their own offset: eight-byte decimal numbers.
func pattern(n int) string { return "seq -f %07.0f 0 " + strconv.Itoa(n/8-1) }

func patternAt(off, n int64) string {
	var b strings.Builder
	for i := off / 8; i*8 < off+n; i++ {
		s := "000000" + strconv.FormatInt(i, 10)
		b.WriteString(s[len(s)-7:] + "\n")
	}
	return b.String()[off%8:][:n]
}

func TestDetachedOutputIsBounded(t *testing.T) {
	const total, limit = 400_000, 10_000
	ps := newProcesses(t, Config{OutputLimit: limit})
	p := start(t, ps, ExecSpec{Argv: sh(pattern(total))})
	e := wait(t, p)
	if want := (OutputStats{Bytes: total, Dropped: total - limit, Start: total - limit, EOF: true}); e.Stdout != want {
		t.Errorf("counted as %+v, want %+v", e.Stdout, want)
	}
	if len(p.Stdout().buf) != limit || p.Stderr().buf != nil {
		t.Errorf("rings of %d and %d bytes", len(p.Stdout().buf), len(p.Stderr().buf))
	}
	r := attach(t, p.Stdout(), 5)
	if r.Began() != total-limit || r.Lost() != total-limit-5 {
		t.Errorf("began at %d, lost %d", r.Began(), r.Lost())
	}
	if got := all(t, p.Stdout()); got != patternAt(total-limit, limit) {
		t.Errorf("the tail is wrong: %.40q…", got)
	}
	for _, bad := range []int64{-2, total + 1} {
		_, err := p.Stdout().Attach(bad)
		wantKind(t, err, ErrInvalid)
	}
	if r := attach(t, p.Stdout(), FromEnd); r.Began() != total || r.Lost() != 0 {
		t.Errorf("from the end: %d, %d", r.Began(), r.Lost())
	}
}

func TestReattach(t *testing.T) {
	const limit = 4096
	ps := newProcesses(t, Config{OutputLimit: limit})
	p := start(t, ps, ExecSpec{Argv: sh(pattern(3200) + "; read x; seq -f %07.0f 400 7999; read x; echo end"), Stdin: true})
	r := attach(t, p.Stdout(), 0)
	got := make([]byte, 1000)
	if _, err := io.ReadFull(readerOf(t, r), got); err != nil || string(got) != patternAt(0, 1000) {
		t.Fatalf("%.20q %v", got, err)
	}
	if r.Offset() != 1000 {
		t.Errorf("offset %d", r.Offset())
	}
	// A reader that comes back can read the same bytes again while they are kept.
	again := attach(t, p.Stdout(), 8)
	if again.Began() != 8 || again.Lost() != 0 {
		t.Errorf("began at %d, lost %d", again.Began(), again.Lost())
	}
	r.Close()
	if _, err := r.TryRead(got); err != ErrClosed {
		t.Errorf("read from a closed reader: %v", err)
	}
	p.WriteStdin(nil, []byte("\n"))
	rest := make([]byte, 64_000-8)
	if _, err := io.ReadFull(readerOf(t, again), rest); err != nil || string(rest) != patternAt(8, 64_000-8) {
		t.Fatalf("what followed is wrong: %v", err)
	}
	if _, err := again.TryRead(got); err != ErrWouldBlock {
		t.Errorf("nothing to read gave %v", err)
	}
	stop := make(chan struct{})
	close(stop)
	// A wake-up may be pending, but stop takes effect in the end.
	if _, err := again.Read(stop, got); err != ErrStopped {
		t.Errorf("stopped read gave %v", err)
	}
	again.Close()
	again.Close()
	// Without a reader the exec goes on.
	p.WriteStdin(nil, []byte("\n"))
	e := wait(t, p)
	if e.Stdout.Bytes != 64_004 || e.Stdout.Dropped != 0 {
		t.Errorf("consumed bytes counted as dropped: %+v", e.Stdout)
	}
	late := attach(t, p.Stdout(), 64_000)
	if got := until(t, late, "end\n"); got != "end\n" {
		t.Errorf("late reader got %q", got)
	}
	if n, err := late.Read(nil, got); n != 0 || err != io.EOF {
		t.Errorf("at the end: %d %v", n, err)
	}
}

func TestStalledReader(t *testing.T) {
	ps := newProcesses(t, Config{OutputLimit: 8192})
	stalled := start(t, ps, ExecSpec{Argv: sh("echo side >&2; read x; " + pattern(1<<20)), Stdin: true})
	r := attach(t, stalled.Stdout(), 0)
	stalled.WriteStdin(nil, []byte("\n"))
	<-r.Ready() // there is output, and it is not consumed
	// Neither its other stream nor other execs wait for the stalled reader.
	until(t, attach(t, stalled.Stderr(), 0), "side")
	if _, out, _ := run(t, ps, ExecSpec{Argv: sh("echo other")}); out != "other\n" {
		t.Errorf("other exec printed %q", out)
	}
	if _, ended := stalled.Exit(); ended {
		t.Error("it ended with a megabyte unread")
	}
	half := make([]byte, 512<<10)
	if _, err := io.ReadFull(readerOf(t, r), half); err != nil || string(half) != patternAt(0, 512<<10) {
		t.Fatalf("lost something: %v", err)
	}
	if s := stalled.Stdout().Stats(); s.Dropped != 0 {
		t.Errorf("dropped %d bytes under a reader", s.Dropped)
	}
	// The connection is lost, and the exec must run to its end by itself.
	at := r.Offset()
	r.Close()
	e := wait(t, stalled)
	if e.Stdout.Bytes != 1<<20 || e.Stdout.Dropped != 1<<20-8192-at {
		t.Errorf("counted as %+v, consumed %d", e.Stdout, at)
	}
}

func TestTooManyReaders(t *testing.T) {
	ps := newProcesses(t, Config{})
	p := start(t, ps, ExecSpec{Argv: []string{"true"}})
	for range maxReaders {
		attach(t, p.Stdout(), 0)
	}
	_, err := p.Stdout().Attach(0)
	wantKind(t, err, ErrTooMany)
}

// TestOneGoroutineFollowsTwoStreams is how a connection should read an exec.
func TestOneGoroutineFollowsTwoStreams(t *testing.T) {
	ps := newProcesses(t, Config{OutputLimit: 4096})
	p := start(t, ps, ExecSpec{Argv: sh(pattern(80_000) + " & " + pattern(40_000) + ">&2; wait")})
	streams := []*Reader{attach(t, p.Stdout(), 0), attach(t, p.Stderr(), 0)}
	var got [2]strings.Builder
	buf := make([]byte, 1000)
	for open := 2; open > 0; {
		open = 2
		for i, r := range streams {
			for {
				n, err := r.TryRead(buf)
				got[i].Write(buf[:n])
				if err == io.EOF {
					open--
				}
				if err != nil {
					break
				}
			}
		}
		if open > 0 {
			select {
			case <-streams[0].Ready():
			case <-streams[1].Ready():
			case <-time.After(patience):
				t.Fatal("nothing comes")
			}
		}
	}
	if got[0].String() != patternAt(0, 80_000) || got[1].String() != patternAt(0, 40_000) {
		t.Errorf("%d and %d bytes, or wrong ones", got[0].Len(), got[1].Len())
	}
}

func TestGrandchildHoldsStdout(t *testing.T) {
	ps := newProcesses(t, Config{})
	dir := t.TempDir()
	for _, f := range []string{"/go", "/alive"} {
		if err := unix.Mkfifo(dir+f, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := start(t, ps, ExecSpec{Argv: sh("(read x <" + dir + "/go; for i in 1 2 3; do echo late; done; echo alive >" + dir + "/alive) & echo hi")})
	r := attach(t, p.Stdout(), 0)
	b, err := io.ReadAll(readerOf(t, r))
	if err != nil || string(b) != "hi\n" {
		t.Fatalf("%q %v", b, err)
	}
	if e := wait(t, p); e.Stdout.Bytes != 3 || !e.Stdout.EOF {
		t.Errorf("counted as %+v", e.Stdout)
	}
	// Its output is discarded now, but it must not die of SIGPIPE.
	if err := os.WriteFile(dir+"/go", []byte("\n"), 0); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(dir + "/alive"); err != nil || string(b) != "alive\n" {
		t.Errorf("the grandchild said %q %v", b, err)
	}
}

func TestGrandchildThatNeverStops(t *testing.T) {
	ps := newProcesses(t, Config{OutputLimit: 4096})
	life := newLifeline(t)
	for _, attached := range []bool{true, false} {
		p := start(t, ps, ExecSpec{Argv: sh("exec 9>" + life.path + "; yes & read x"), Stdin: true})
		r := attach(t, p.Stdout(), 0)
		before := p.Stdout().Stats().Dropped
		<-r.Ready()
		if !attached {
			r.Close()
		}
		p.WriteStdin(nil, []byte("\n"))
		wait(t, p)
		if attached {
			if _, err := io.Copy(io.Discard, readerOf(t, r)); err != nil {
				t.Error(err)
			}
		}
		if s := p.Stdout().Stats(); !s.EOF || (attached && s.Dropped != before) {
			t.Errorf("attached %v: %+v", attached, s)
		}
		if err := p.Signal(syscall.SIGKILL, ScopeSession); err != nil {
			t.Error(err)
		}
	}
	life.awaitEnd(t)
}

// TestOutputAgainstModel drives one ring with random writes, reads, detachments and
// new attachments. Every byte is a function of its offset.
func TestOutputAgainstModel(t *testing.T) {
	at := func(off int64) byte { return byte(off*31 ^ off>>8) }
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var fd [2]int
		if err := unix.Pipe2(fd[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		o, err := newOutput(os.NewFile(uintptr(fd[0]), "pipe"), 1+rnd.IntN(20_000), false, &sink{})
		if err != nil {
			t.Fatal(err)
		}
		var written, seen int64
		var r *Reader
		take := func(p []byte) error {
			n, err := r.TryRead(p)
			for i, b := range p[:n] {
				if want := at(r.Offset() - int64(n) + int64(i)); b != want {
					t.Fatalf("seed %d: wrong byte at %d", seed, r.Offset()-int64(n)+int64(i))
				}
			}
			seen = max(seen, r.Offset())
			return err
		}
		for range 300 {
			switch rnd.IntN(5) {
			case 0, 1:
				p := make([]byte, 1+rnd.IntN(9000))
				for i := range p {
					p[i] = at(written + int64(i))
				}
				if n, err := unix.Write(fd[1], p); err == nil {
					written += int64(n)
				}
			case 2:
				for o.fill(fd[0]) == fillMore {
				}
			case 3:
				if r == nil {
					from := rnd.Int64N(o.Stats().Bytes + 1)
					if r, err = o.Attach(from); err != nil {
						t.Fatal(err)
					}
					if r.Began()-r.Lost() != from || r.Began() != max(from, o.Stats().Start) {
						t.Fatalf("seed %d: asked %d, began %d, lost %d", seed, from, r.Began(), r.Lost())
					}
				} else if rnd.IntN(4) == 0 {
					r.Close()
					r = nil
				}
			case 4:
				if r != nil {
					take(make([]byte, rnd.IntN(6000)))
				}
			}
		}
		unix.Close(fd[1])
		if r == nil {
			r, _ = o.Attach(0)
		}
		for {
			for o.fill(fd[0]) == fillMore {
			}
			if take(make([]byte, 4096)) == io.EOF {
				break
			}
		}
		if s := o.Stats(); s.Bytes != written || seen != written || s.Dropped > written {
			t.Errorf("seed %d: wrote %d, saw %d, %+v", seed, written, seen, s)
		}
		o.file.Close()
	}
}
