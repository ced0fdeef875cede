package gvisor

import (
	"context"
	"errors"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// These tests play a helper that was taken over. The test program starts itself again
// as the helper, with a listening control socket.

// hostileEnv names the lie, in the environment of such a process.
const hostileEnv = "AGENTRUN_TEST_HOSTILE"

func init() {
	if lie := os.Getenv(hostileEnv); lie != "" {
		playHostile(lie)
		os.Exit(0)
	}
}

// hostileID is the id of the sandbox that the helper plays.
const hostileID = "00112233445566778899aabbccddeeff"

// checkpointLies are lies about a checkpoint, told after the files were written.
var checkpointLies = map[string]func(files []*os.File, reply *gvisorctl.Message) error{
	"pages of 1 TiB":     func(f []*os.File, _ *gvisorctl.Message) error { return f[2].Truncate(1 << 40) },
	"a state of 1 TiB":   func(f []*os.File, _ *gvisorctl.Message) error { return f[0].Truncate(1 << 40) },
	"a list of 1 TiB":    func(f []*os.File, _ *gvisorctl.Message) error { return f[1].Truncate(1 << 40) },
	"pages stay mapped":  func(f []*os.File, _ *gvisorctl.Message) error { return mapForGood(f[2]) },
	"a negative pause":   func(_ []*os.File, r *gvisorctl.Message) error { r.Took = -1; return nil },
	"a pause of an age":  func(_ []*os.File, r *gvisorctl.Message) error { r.Took = math.MaxInt64; return nil },
	"nothing of it true": func([]*os.File, *gvisorctl.Message) error { return nil }, // used by TestWritesAfterwards
}

func mapForGood(f *os.File) error {
	_, err := unix.Mmap(int(f.Fd()), 0, layer.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return err
}

// words are messages that a helper sends instead of an answer to the request for its
// console.
var words = map[string]func(gvisorctl.Conn) error{
	"an answer to nobody": func(c gvisorctl.Conn) error { return c.Send(&gvisorctl.Message{ID: 12345, Reply: true}) },
	"a request":           func(c gvisorctl.Conn) error { return c.Send(&gvisorctl.Message{ID: 1, Op: gvisorctl.OpStop}) },
	"no message":          func(c gvisorctl.Conn) error { return c.SendBytes([]byte("{")) },
	"two ends": func(c gvisorctl.Conn) error {
		e := &gvisorctl.Message{Exit: &gvisorctl.Exit{Reason: gvisorctl.ReasonPowerOff}}
		return errors.Join(c.Send(e), c.Send(e))
	},
	"a descriptor":  func(c gvisorctl.Conn) error { return c.Send(&gvisorctl.Message{Exit: &gvisorctl.Exit{}}, os.Stdin) },
	"socket closed": func(c gvisorctl.Conn) error { return c.Close() },
}

// describeLies are answers to OpDescribe.
var describeLies = map[string]*gvisorctl.Create{
	"nothing":          nil,
	"no id":            {},
	"the whole folder": {ID: "."},
	"another folder":   {ID: "../resident"}, // a folder of the test
	"upper case":       {ID: strings.ToUpper(hostileID)},
	"a long id":        {ID: hostileID + "00"},
}

// wireLies are the descriptors in the answer to OpWire.
var wireLies = map[string]func() []*os.File{
	"no wire":           func() []*os.File { return nil },
	"a file":            func() []*os.File { return []*os.File{os.Stdin} },
	"the host's socket": func() []*os.File { return ownPair(unix.SOCK_DGRAM)[:1] },
	"a stream":          func() []*os.File { return ownPair(unix.SOCK_STREAM)[:1] },
	"two wires":         func() []*os.File { return ownPair(unix.SOCK_DGRAM) },
}

// ownPair is a pair of sockets in this process's network namespace.
func ownPair(kind int) []*os.File {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return []*os.File{os.NewFile(uintptr(fds[0]), "a"), os.NewFile(uintptr(fds[1]), "b")}
}

// playHostile is the main function of the hostile helper.
func playHostile(lie string) {
	if unix.SetNonblock(3, true) != nil {
		os.Exit(1)
	}
	c, err := vmmctl.Accept(os.NewFile(3, "listener"))
	if err != nil {
		os.Exit(1)
	}
	conn := gvisorctl.Conn{Conn: c}
	for {
		m, files, err := conn.Receive()
		if err != nil && lie == "socket closed" {
			for { // the process goes on
				_ = unix.Pause()
			}
		}
		if err != nil || lie == "death" {
			return
		}
		reply := &gvisorctl.Message{ID: m.ID, Reply: true}
		switch m.Op {
		case gvisorctl.OpDescribe:
			reply.Create, reply.Protocol = &gvisorctl.Create{ID: hostileID}, gvisorctl.Protocol
			if told, lies := describeLies[lie]; lies {
				reply.Create = told
			}
		case gvisorctl.OpConsole:
			if say := words[lie]; say != nil {
				_ = say(conn)
				continue
			}
		case gvisorctl.OpWire:
			if send := wireLies[lie]; send != nil {
				_ = conn.Send(reply, send()...)
				continue
			}
		case gvisorctl.OpStream: // it keeps the pipes open
		case gvisorctl.OpCheckpoint:
			if lie == "silence" {
				continue
			}
			if err := writeHostile(lie, files, reply); err != nil {
				reply.Error = err.Error()
			}
		}
		_ = conn.Send(reply)
	}
}

func writeHostile(lie string, files []*os.File, reply *gvisorctl.Message) error {
	reply.Took = time.Millisecond
	for _, f := range files {
		if _, err := f.Write(make([]byte, layer.PageSize)); err != nil {
			return err
		}
	}
	if tell := checkpointLies[lie]; tell != nil {
		return tell(files, reply)
	}
	return nil
}

// startHostile starts a hostile helper, and attaches to it as if another process had
// started it.
func startHostile(t *testing.T, lie string) (*sandbox, error) {
	t.Helper()
	dir := t.TempDir()
	e := &Engine{
		cfg:    Config{Resident: filepath.Join(dir, "resident"), RunDir: filepath.Join(dir, "run")},
		groups: func() (*jail.Groups, error) { return nil, nil }, // without limits
	}
	if err := errors.Join(os.Mkdir(e.cfg.Resident, 0o700), os.MkdirAll(e.runDirOf(hostileID), 0o700)); err != nil {
		t.Fatal(err)
	}
	control := filepath.Join(dir, "control")
	listener, err := vmmctl.Listen(control)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), hostileEnv+"="+lie)
	cmd.ExtraFiles = []*os.File{listener}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if err := listener.Close(); err != nil {
			t.Error(err)
		}
	})
	id, err := procid.Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	p, err := e.attach(ctx, control, id)
	// Whatever the helper says, only its own folder is removed.
	t.Cleanup(func() {
		for _, dir := range []string{e.cfg.RunDir, e.cfg.Resident} {
			if _, err := os.Stat(dir); err != nil {
				t.Error(err)
			}
		}
	})
	if err != nil {
		return nil, err
	}
	t.Cleanup(p.kill)
	root, err := memoryFile("root", nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &sandbox{process: p, engine: e, vcpus: 1, memory: 1 << 20, disk: 1 << 20, root: newShared(root)}
	t.Cleanup(func() {
		if err := s.release(); err != nil {
			t.Error(err)
		}
	})
	s.paused.Store(true) // so that its agent is not asked for anything
	return s, nil
}

// killedFor fails unless the helper was killed for this reason.
func killedFor(t *testing.T, s *sandbox, why string) {
	t.Helper()
	select {
	case <-s.Done():
	case <-time.After(time.Minute):
		t.Fatal("it lives on")
	}
	if err := s.Wait(); !errors.Is(err, engine.ErrEnded) || !strings.Contains(err.Error(), "gvisor-helper was killed: "+why) {
		t.Errorf("it ended with %v", err)
	}
}

// TestHostileCheckpoint: invalid files of a checkpoint end the sandbox, and nothing
// is made from them.
func TestHostileCheckpoint(t *testing.T) {
	for _, lie := range slices.Sorted(maps.Keys(checkpointLies)) {
		if lie == "nothing of it true" {
			continue
		}
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			s, err := startHostile(t, lie)
			if err != nil {
				t.Fatal(err)
			}
			if c, _, err := s.take(t.Context()); !errors.Is(err, engine.ErrEnded) {
				t.Errorf("taken: %v, %v", c, err)
			}
			killedFor(t, s, "what it has written cannot be")
		})
	}
}

// TestWritesAfterwards: a capture does not change, although the sandbox still has its
// files open.
func TestWritesAfterwards(t *testing.T) {
	s, err := startHostile(t, "nothing of it true")
	if err != nil {
		t.Fatal(err)
	}
	c, took, err := s.take(t.Context())
	if err != nil || took != time.Millisecond {
		t.Fatal(took, err)
	}
	defer c.close()
	for _, f := range c.list() {
		info, err := f.Stat()
		if err != nil || info.Size() != layer.PageSize {
			t.Fatal(info, err)
		}
		w, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(f.Fd())), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s can be written: %v", f.Name(), err)
		}
		if err := w.Truncate(1 << 30); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s can grow: %v", f.Name(), err)
		}
		_ = w.Close()
		// The sandbox's descriptor has an offset of its own.
		if n, err := f.Read(make([]byte, 2*layer.PageSize)); n != layer.PageSize || err != nil {
			t.Errorf("%s: %d bytes, %v", f.Name(), n, err)
		}
	}
}

// TestHostileWire: a helper that sends another descriptor than the wire is killed,
// and its descriptor is not handed out.
func TestHostileWire(t *testing.T) {
	for _, lie := range slices.Sorted(maps.Keys(wireLies)) {
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			s, err := startHostile(t, lie)
			if err != nil {
				t.Fatal(err)
			}
			s.FindWire(s.askWire)
			if f, err := s.Wire(); !errors.Is(err, engine.ErrEnded) {
				t.Errorf("asked for its wire: %v, %v", f, err)
			}
			killedFor(t, s, "it has ")
		})
	}
}

// TestHostileWords: a helper that sends an unexpected message, or stops answering, is
// killed.
func TestHostileWords(t *testing.T) {
	for _, lie := range slices.Sorted(maps.Keys(words)) {
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			s, err := startHostile(t, lie)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := s.Console(ctx); !errors.Is(err, engine.ErrEnded) {
				t.Errorf("asked for its console: %v", err)
			}
			killedFor(t, s, "it has ")
		})
	}
}

// TestHostileDescribe: an invalid id is refused, because folders are removed and
// groups are opened by the id that a helper reports.
func TestHostileDescribe(t *testing.T) {
	for _, lie := range slices.Sorted(maps.Keys(describeLies)) {
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			if s, err := startHostile(t, lie); !errors.Is(err, engine.ErrEnded) || !strings.Contains(err.Error(), "it has described what cannot be") {
				t.Errorf("%v, %v", s, err)
			}
		})
	}
	if _, err := startHostile(t, "death"); !errors.Is(err, engine.ErrEnded) {
		t.Errorf("one that dies before it has told: %v", err)
	}
}

// TestDeadline: a helper that never answers is killed, or ends when it is closed.
func TestDeadline(t *testing.T) {
	s, err := startHostile(t, "silence")
	if err != nil {
		t.Fatal(err)
	}
	s.patience.Store(int64(10 * time.Millisecond))
	if _, _, err := s.take(t.Context()); !errors.Is(err, engine.ErrEnded) {
		t.Error(err)
	}
	killedFor(t, s, `it has not answered "checkpoint" within 10ms`)
}

// TestAnswersEarly: the wait for a helper that claims to have written everything but
// keeps its pipes open is bounded.
func TestAnswersEarly(t *testing.T) {
	s, err := startHostile(t, "answers early")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b, err := snapshot.NewBuilder(filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Abort() }() // nothing was made
	if _, _, err := s.stream(ctx, b); !errors.Is(err, engine.ErrEnded) {
		t.Errorf("a capture: %v", err)
	}
	killedFor(t, s, "it has not closed a pipe")
}
