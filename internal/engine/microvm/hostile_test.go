package microvm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm"
	"agentrun.dev/internal/vmm/livefork"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
	"golang.org/x/sys/unix"
)

// These tests play a vmm process that was taken over. The test program starts itself
// again as the vmm, with a control socket and the files that a vmm gets.

// hostileEnv names the lie, in the environment of such a process.
const hostileEnv = "AGENTRUN_TEST_HOSTILE"

func init() {
	if lie := os.Getenv(hostileEnv); lie != "" {
		playHostile(lie)
		os.Exit(0)
	}
}

// Sizes of the machine that the process plays.
const (
	hostileRAM  = mib
	hostileDisk = mib
	page        = layer.PageSize
)

// saving holds the files that a vmm gets with Save, and its answer.
type saving struct {
	state, memory, disk *os.File
	saved               vmmctl.Saved
	raw                 []byte // the answer, if it is not saved
}

// honest saves one page of memory, and one of the disk.
func (w *saving) honest() error {
	encoded, err := (&vmm.State{Memory: hostileRAM}).Marshal()
	if err != nil {
		return err
	}
	one := bytes.Repeat([]byte("page"), page/4)
	_, stateErr := w.state.WriteAt(encoded, 0)
	_, memoryErr := w.memory.WriteAt(one, page)
	_, diskErr := w.disk.WriteAt(one, 0)
	run := []extent.Run{{Start: page, Length: page}}
	w.saved = vmmctl.Saved{Memory: vmmctl.Change{Runs: run}, Disks: []vmmctl.Change{{Runs: slices.Clone(run)}}, Stats: livefork.Stats{Pause: 1000, Copied: page}}
	return errors.Join(stateErr, memoryErr, diskErr, w.memory.Truncate(hostileRAM))
}

// saveLies are lies told after everything was saved correctly.
var saveLies = map[string]func(*saving) error{
	"runs beyond the memory": func(w *saving) error { w.saved.Memory.Runs[0].Start = hostileRAM; return nil },
	"zeros beyond the memory": func(w *saving) error {
		w.saved.Memory.Zeros = []extent.Run{{Start: 0, Length: 2 * hostileRAM}}
		return nil
	},
	"512 MiB of 1 MiB": func(w *saving) error {
		w.saved.Memory.Runs = slices.Repeat([]extent.Run{{Length: 64 * mib}}, 8)
		return w.memory.Truncate(1 << 40) // sparse: it costs the vmm nothing
	},
	"overlapping runs": func(w *saving) error {
		w.saved.Memory.Runs = []extent.Run{{Start: 0, Length: 2 * page}, {Start: page, Length: page}}
		return nil
	},
	"unsorted runs": func(w *saving) error {
		w.saved.Memory.Runs = []extent.Run{{Start: page, Length: page}, {Start: 0, Length: page}}
		return nil
	},
	"part of a page": func(w *saving) error { w.saved.Memory.Runs[0].Length = 100; return nil },
	"zeros over runs": func(w *saving) error {
		w.saved.Memory.Zeros = slices.Clone(w.saved.Memory.Runs)
		return nil
	},
	"many runs": func(w *saving) error {
		w.saved.Memory.Runs = nil
		for i := range uint64(layer.MaxRuns + 1) {
			w.saved.Memory.Runs = append(w.saved.Memory.Runs, extent.Run{Start: 2 * i * page, Length: page})
		}
		return nil
	},
	"2^40 runs":           func(w *saving) error { w.raw = []byte{1, 0x80, 0x80, 0x80, 0x80, 0x80, 0x20, 0, 0}; return nil },
	"no sense at all":     func(w *saving) error { w.raw = []byte("nonsense"); return nil },
	"memory file shorter": func(w *saving) error { return w.memory.Truncate(hostileRAM / 2) },
	"memory file larger":  func(w *saving) error { return w.memory.Truncate(2 * hostileRAM) },
	"memory stays mapped": func(w *saving) error { return mapForGood(w.memory) },
	"state too large":     func(w *saving) error { return w.state.Truncate(snapshot.MaxState + 1) },
	"state stays mapped":  func(w *saving) error { return mapForGood(w.state) },
	"no state":            func(w *saving) error { return w.state.Truncate(3) },
	"disk file larger":    func(w *saving) error { return w.disk.Truncate(256 * mib) },
	"disk file shorter":   func(w *saving) error { return w.disk.Truncate(0) },
	"disk runs beyond":    func(w *saving) error { w.saved.Disks[0].Runs[0].Start = hostileDisk; return nil },
	"disk zeros beyond": func(w *saving) error {
		w.saved.Disks[0].Zeros = []extent.Run{{Start: 1 << 50, Length: page}}
		return nil
	},
	"disk runs overlap":    func(w *saving) error { w.saved.Disks[0].Runs = slices.Repeat(w.saved.Disks[0].Runs, 2); return nil },
	"a disk too few":       func(w *saving) error { w.saved.Disks = nil; return nil },
	"a disk too many":      func(w *saving) error { w.saved.Disks = slices.Repeat(w.saved.Disks, 2); return nil },
	"a negative pause":     func(w *saving) error { w.saved.Pause = -1; return nil },
	"a pause of 292 years": func(w *saving) error { w.saved.Pause = math.MaxInt64; return nil },
	"a negative wait":      func(w *saving) error { w.saved.LongestWait = -1; return nil },
	"more than was copied": func(w *saving) error { w.saved.Copied = math.MaxUint64; return nil },
}

// mapForGood keeps a file in memory writable.
func mapForGood(f *os.File) error {
	_, err := unix.Mmap(int(f.Fd()), 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return err
}

// words are messages that a vmm sends instead of an answer to the request for its
// console.
var words = map[string]func(*vmmctl.Conn) error{
	"an answer to nobody":   func(c *vmmctl.Conn) error { return c.Send(&vmmctl.Reply{ID: 12345}) },
	"a request":             func(c *vmmctl.Conn) error { return c.Send(&vmmctl.Simple{Kind: vmmctl.KindStop, ID: 1}) },
	"unknown kind":          func(c *vmmctl.Conn) error { return c.SendBytes([]byte{200, 1}) },
	"half a message":        func(c *vmmctl.Conn) error { return c.SendBytes([]byte{byte(vmmctl.KindReply)}) },
	"ready twice":           func(c *vmmctl.Conn) error { return errors.Join(c.Send(&vmmctl.Ready{}), c.Send(&vmmctl.Ready{})) },
	"an end without reason": func(c *vmmctl.Conn) error { return c.Send(&vmmctl.Exit{Reason: "boredom"}) },
	"its limit was reached": func(c *vmmctl.Conn) error { return c.Send(&vmmctl.Exit{Reason: string(vmstate.OutOfMemory)}) },
	"two ends": func(c *vmmctl.Conn) error {
		e := &vmmctl.Exit{Reason: string(vmstate.Panic)}
		return errors.Join(c.Send(e), c.Send(e))
	},
	"a descriptor":  func(c *vmmctl.Conn) error { return c.Send(&vmmctl.Ready{}, os.Stdin) },
	"socket closed": func(c *vmmctl.Conn) error { return c.Close() },
	"socket given away": func(c *vmmctl.Conn) error {
		control, err := unix.Dup(3)
		if err != nil {
			return err
		}
		holder := exec.Command("/proc/self/exe")
		holder.Env = append(os.Environ(), hostileEnv+"=hold")
		holder.ExtraFiles = []*os.File{os.NewFile(uintptr(control), "control"), os.NewFile(4, "end")}
		return errors.Join(holder.Start(), c.Send(&vmmctl.Ready{}))
	},
}

// touchLies are answers to Touched.
var touchLies = map[string][]byte{
	"touched beyond":    vmmctl.Touched{Written: []extent.Run{{Start: hostileRAM, Length: page}}}.Marshal(),
	"read beyond":       vmmctl.Touched{Read: []extent.Run{{Start: 0, Length: 1 << 50}}}.Marshal(),
	"touched unsorted":  vmmctl.Touched{Written: []extent.Run{{Start: page, Length: page}, {Start: 0, Length: page}}}.Marshal(),
	"touched twice":     vmmctl.Touched{Written: []extent.Run{{Start: page, Length: page}, {Start: page, Length: page}}}.Marshal(),
	"touched no page":   vmmctl.Touched{Written: []extent.Run{{Start: 1, Length: 1}}}.Marshal(),
	"a million touched": append([]byte{1, 0xc0, 0x84, 0x3d}, make([]byte, 4000)...),
}

// playHostile is the main function of the hostile vmm.
func playHostile(lie string) {
	if lie == "hold" { // it keeps the socket open until the test ends
		_, _ = os.NewFile(4, "end").Read(make([]byte, 1))
		return
	}
	file, err := os.NewFile(3, "control"), unix.SetNonblock(3, true)
	conn, connErr := vmmctl.NewConn(file)
	if errors.Join(err, connErr) != nil {
		os.Exit(1)
	}
	for {
		m, files, err := conn.Receive()
		if err != nil && lie == "socket closed" {
			for { // the process goes on
				_ = unix.Pause()
			}
		}
		if err != nil {
			return
		}
		if err := answerHostile(conn, lie, m, files); err != nil {
			_ = conn.Send(&vmmctl.Exit{Reason: string(vmstate.InternalError), Detail: err.Error()})
			return
		}
	}
}

// hoard holds the files of disks that a vmm with the lie "hoards" has kept.
var hoard []*os.File

func answerHostile(conn *vmmctl.Conn, lie string, m vmmctl.Message, files []*os.File) error {
	switch m := m.(type) {
	case *vmmctl.Connect:
		return conn.Send(&vmmctl.Reply{ID: m.ID, Error: "there is no guest"})
	case *vmmctl.Simple:
		if say := words[lie]; say != nil && m.Kind == vmmctl.KindConsole {
			return say(conn)
		}
		return conn.Send(&vmmctl.Reply{ID: m.ID, Data: touchLies[lie]})
	case *vmmctl.Save:
		if lie == "older" && m.Stream {
			return conn.Close() // it does not know the message
		}
		if lie == "silence" {
			return conn.Send(&vmmctl.Ready{}) // tells the test that Save has arrived
		}
		if lie == "answers early" { // and keeps its pipes open
			return conn.Send(&vmmctl.Reply{ID: m.ID, Data: (&vmmctl.Saved{Disks: make([]vmmctl.Change, 1)}).Marshal()})
		}
		w := &saving{state: files[1], memory: files[2], disk: files[3]}
		if err := w.honest(); err != nil {
			return err
		}
		if tell := saveLies[lie]; tell != nil {
			if err := tell(w); err != nil {
				return err
			}
		}
		if w.raw == nil {
			w.raw = w.saved.Marshal()
		}
		if lie == "hoards" {
			hoard = append(hoard, files[3:]...)
			for _, f := range hoard { // up to its limit on the size of a file
				if err := unix.Fallocate(int(f.Fd()), 0, 0, hostileDisk); err != nil {
					return err
				}
			}
			if err := files[3].Truncate(page); err != nil { // the parent checks this file
				return err
			}
		}
		for _, f := range files {
			if lie != "keeps files" && lie != "hoards" {
				_ = f.Close() // as an honest vmm does
			}
		}
		return conn.Send(&vmmctl.Reply{ID: m.ID, Data: w.raw})
	}
	if lie == "silence" {
		return nil
	}
	return errors.New("not expected")
}

// startHostile starts a hostile vmm for a sandbox that was booted.
func startHostile(t *testing.T, lie string) *sandbox { return startHostileIn(t, &jail.Cell{}, lie) }

// startHostileIn starts a hostile vmm in the cell of another process.
func startHostileIn(t *testing.T, cell *jail.Cell, lie string) *sandbox {
	t.Helper()
	ours, theirs, err := vmmctl.Pair()
	if err != nil {
		t.Fatal(err)
	}
	end, endOfTest, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), hostileEnv+"="+lie)
	cmd.ExtraFiles = []*os.File{theirs, end}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(theirs.Close(), end.Close()); err != nil {
		t.Fatal(err)
	}
	id, err := procid.Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	held, err := procid.Adopt(id)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := vmmctl.NewConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	p := process.Hold(process.NewAdopted(held, cell), conn, cell, hostileRAM)
	t.Cleanup(func() {
		_ = endOfTest.Close()
		p.Kill()
		_ = cmd.Wait() // it was killed
	})
	s := &sandbox{
		engine: jailedEngine(t, nil, residentFolder(t)), kernel: "known", vcpus: 1, Guest: &Guest{Process: p},
		memory: layer.Stack{Size: hostileRAM}, disks: []disk{{id: "scratch", stack: layer.Stack{Size: hostileDisk}}},
	}
	kernel, err := process.MemoryFile("kernel", nil)
	if err != nil {
		t.Fatal(err)
	}
	root, err := process.MemoryFile("root", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.boot = &bootFiles{users: 1, kernel: kernel, root: root}
	t.Cleanup(func() {
		if err := s.release(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// killedFor fails unless the process was killed for this reason.
func killedFor(t *testing.T, s *sandbox, why string) {
	t.Helper()
	select {
	case <-s.Done():
	case <-time.After(time.Minute):
		t.Fatal("it lives on")
	}
	exit, _ := s.Guest.Wait()
	if exit.Reason != vmstate.Killed || !strings.Contains(exit.Detail, "the vmm process was killed: "+why) {
		t.Errorf("it ended with %v", exit)
	}
	if err := s.Wait(); !errors.Is(err, engine.ErrEnded) || errors.Is(err, engine.ErrOutOfMemory) {
		t.Error(err)
	}
}

// TestHostileSave: if a vmm lies about a capture, nothing is made from the capture
// and the vmm is killed.
func TestHostileSave(t *testing.T) {
	for _, lie := range slices.Sorted(maps.Keys(saveLies)) {
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			s := startHostile(t, lie)
			if f, err := s.Fork(t.Context(), nil); !errors.Is(err, engine.ErrEnded) {
				t.Errorf("a live fork: %v, %v", f, err)
			}
			killedFor(t, s, "what it has saved cannot be")
			s = startHostile(t, lie)
			dir := filepath.Join(t.TempDir(), "snapshot")
			if _, err := s.Snapshot(t.Context(), dir); !errors.Is(err, engine.ErrEnded) {
				t.Errorf("a snapshot: %v", err)
			}
			killedFor(t, s, "what it has saved cannot be")
			if _, err := os.Stat(dir); err == nil {
				t.Error("there is a snapshot")
			}
		})
	}
}

// TestHostileWords: a vmm that sends an unexpected message, or stops answering, is
// killed.
func TestHostileWords(t *testing.T) {
	for _, lie := range slices.Sorted(maps.Keys(words)) {
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			s := startHostile(t, lie)
			if lie == "socket given away" {
				asked := make(chan error)
				go func() { _, err := s.Console(t.Context()); asked <- err }()
				if err := s.WaitReady(t.Context()); err != nil { // it has sent Ready
					t.Error(err)
				}
				s.Kill()
				if err := <-asked; !errors.Is(err, engine.ErrEnded) {
					t.Error(err)
				}
				killedFor(t, s, "its control socket stayed open")
				return
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

// TestHostileTouched: invalid lists of touched pages are refused, because all later
// forks would get those pages.
func TestHostileTouched(t *testing.T) {
	for _, lie := range slices.Sorted(maps.Keys(touchLies)) {
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			s := startHostile(t, lie)
			var m touched
			about := subject{snapshot: snapshot.ID{1}}
			for range ForksAsked {
				m.of(about)
				m.learn(t.Context(), about, s.Process)
			}
			if pages := m.known(about.snapshot); len(pages.Written)+len(pages.Read) > 0 {
				t.Errorf("believed: %v", pages)
			}
			killedFor(t, s, "it has touched what cannot be")
		})
	}
}

// TestSilentSave: a vmm that never answers can be killed, and the fork that waits for
// its answer then fails.
func TestSilentSave(t *testing.T) {
	s := startHostile(t, "silence")
	var forked sync.WaitGroup
	forked.Go(func() {
		if _, err := s.Fork(t.Context(), nil); !errors.Is(err, engine.ErrEnded) {
			t.Error(err)
		}
	})
	if err := s.WaitReady(t.Context()); err != nil { // Save has arrived
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	forked.Wait()
}

// TestWritesAfterwards: a capture does not change, although the vmm still has all its
// files open.
func TestWritesAfterwards(t *testing.T) {
	s := startHostile(t, "keeps files")
	m, saved, err := s.captureLive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.release(); err != nil {
			t.Error(err)
		}
	}()
	if saved.Copied != page || len(m.live) != 2 {
		t.Errorf("%+v, %d layers", saved, len(m.live))
	}
	want := bytes.Repeat([]byte("page"), page/4)
	for _, l := range m.live {
		// A file in memory is the same open file in the vmm and the parent, so its
		// offset is not to be relied on.
		if strings.Contains(l.file.Name(), process.ChargedName) {
			if _, err := l.file.WriteAt([]byte("x"), page); !errors.Is(err, unix.EPERM) {
				t.Errorf("written to a sealed file: %v", err)
			}
			if got := make([]byte, page); !readsAs(l.file, got, page, want) {
				t.Errorf("the memory is %q…", got[:8])
			}
			continue
		}
		for _, fd := range filesOf(t, s.Pid()) {
			if sameFile(t, fd, l.file) {
				t.Errorf("the vmm has %s, the layer of a disk", fd)
			}
		}
		if got := make([]byte, page); !readsAs(l.file, got, 0, want) {
			t.Errorf("the disk is %q…", got[:8])
		}
	}
}

func readsAs(f *os.File, buf []byte, off int64, want []byte) bool {
	_, err := f.ReadAt(buf, off)
	return (err == nil || errors.Is(err, io.EOF)) && bytes.Equal(buf, want)
}

// filesOf lists the descriptors of a process.
func filesOf(t *testing.T, pid int) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "fd", "*"))
	if err != nil || len(all) == 0 {
		t.Fatal(all, err)
	}
	return all
}

func sameFile(t *testing.T, path string, f *os.File) bool {
	t.Helper()
	mine, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	its, err := os.Stat(path)
	return err == nil && os.SameFile(mine, its)
}
