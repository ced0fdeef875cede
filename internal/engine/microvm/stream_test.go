package microvm

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
)

// TestStreamIsChecked: a vmm is not believed if it reports more or less data than it
// has written, other disks, or runs outside of the stack.
func TestStreamIsChecked(t *testing.T) {
	const page = layer.PageSize
	wrote := streamed{memory: layer.Ref{Digest: layer.Digest{1}, Size: 2 * page}, disks: []layer.Ref{{}}}
	for name, c := range map[string]struct {
		saved vmmctl.Saved
		want  string
	}{
		"more":      {vmmctl.Saved{Memory: vmmctl.Change{Runs: []extent.Run{{Length: 3 * page}}}, Disks: make([]vmmctl.Change, 1)}, "speaks of 12288 bytes, and has written 8192"},
		"less":      {vmmctl.Saved{Memory: vmmctl.Change{Runs: []extent.Run{{Length: page}}}, Disks: make([]vmmctl.Change, 1)}, "speaks of 4096 bytes"},
		"no disk":   {vmmctl.Saved{Memory: vmmctl.Change{Runs: []extent.Run{{Length: 2 * page}}}}, "disks"},
		"disk":      {vmmctl.Saved{Memory: vmmctl.Change{Runs: []extent.Run{{Length: 2 * page}}}, Disks: []vmmctl.Change{{Runs: []extent.Run{{Length: page}}}}}, "speaks of 4096 bytes, and has written 0"},
		"no state":  {vmmctl.Saved{Memory: vmmctl.Change{Runs: []extent.Run{{Length: 2 * page}}}, Disks: make([]vmmctl.Change, 1)}, "state"},
		"too many":  {vmmctl.Saved{Memory: vmmctl.Change{Runs: []extent.Run{{Length: 1 << 63}, {Length: 1 << 63}, {Length: 2 * page}}}, Disks: make([]vmmctl.Change, 1)}, "run"},
		"elsewhere": {vmmctl.Saved{Memory: vmmctl.Change{Runs: []extent.Run{{Start: 1 << 40, Length: 2 * page}}}, Disks: make([]vmmctl.Change, 1)}, "run"},
	} {
		t.Run(name, func(t *testing.T) {
			got := &captured{stored: &wrote}
			var err error
			if got.state, err = process.MemoryFile("state", nil); err != nil {
				t.Fatal(err)
			}
			defer got.close()
			err = got.verifyStreamed(c.saved.Marshal(), 16*page, []uint64{page})
			if !errors.Is(err, errLie) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, not a lie with %q", err, c.want)
			}
		})
	}
}

// TestCrowdedStacks: a stack without room for another layer is written in full. Other
// stacks are not.
func TestCrowdedStacks(t *testing.T) {
	full := layer.Stack{Size: 1 << 20, Layers: make([]layer.Ref, layer.MaxLayers)}
	some := layer.Stack{Size: 2 << 20, Layers: make([]layer.Ref, 1)}
	d := &sandbox{memory: full, disks: []disk{{readOnly: true, stack: some}, {stack: some}}}
	save := &vmmctl.Save{Disks: make([][]extent.Run, 1)}
	d.storeCrowded(save, false)
	if len(d.memory.Layers) != 0 || d.memory.Size != full.Size || extent.Total(save.Memory) != full.Size || len(d.disks[1].stack.Layers) != 1 || save.Disks[0] != nil {
		t.Errorf("%+v, %+v", d, save)
	}
	d.storeCrowded(save, true)
	if len(d.disks[0].stack.Layers) != 1 || len(d.disks[1].stack.Layers) != 0 || extent.Total(save.Disks[0]) != some.Size {
		t.Errorf("%+v, %+v", d, save)
	}
}

// TestRunsOf: runs are read one after the other.
func TestRunsOf(t *testing.T) {
	b, err := io.ReadAll(runsOf(strings.NewReader("0123456789"), []extent.Run{{Start: 1, Length: 2}, {Start: 7, Length: 3}}))
	if err != nil || string(b) != "12789" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestStreamOfJailed: a vmm process in its jail writes its machine through pipes,
// within its memory limit. A reader that gives up does not harm it.
func TestStreamOfJailed(t *testing.T) {
	j := openJail(t)
	e := jailedEngine(t, j.Jail, residentFolder(t))
	m := bareMachine(t)
	initrd, err := process.MemoryFile("initrd", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = initrd.Close() }()
	const filled = 40 * mib
	if _, err := io.CopyN(initrd, rand.Reader, filled); err != nil {
		t.Fatal(err)
	}
	top, err := e.top()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = top.Close() }()
	disks := layer.Stack{Size: mib}
	m.addInitrd(initrd)
	m.addDisk(vmmctl.Disk{ID: "data", Stack: &disks}, top)
	p, err := m.start(j.Jail, engine.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	if err := p.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, limit, err := p.Charged()
	if err != nil {
		t.Fatal(err)
	}
	s := &sandbox{
		Guest: &Guest{Process: p}, engine: e, vcpus: int(m.boot.VCPUs), memory: layer.Stack{Size: m.boot.Memory}, disks: []disk{{id: "data", stack: disks}},
	}
	drain := func(ctx context.Context) (size uint64, err error) {
		b, err := snapshot.NewBuilder(filepath.Join(t.TempDir(), "snapshot"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { err = errors.Join(err, b.Abort()) }()
		durable, save := s.durable()
		c, err := s.drain(ctx, b, durable, save)
		if err != nil {
			return 0, err
		}
		defer c.close()
		return c.stored.memory.Size, durable.fits(c)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := drain(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("with nobody who reads: %v", err)
	}
	for range 2 { // twice, since the save rebases nothing
		size, err := drain(t.Context())
		if err != nil || size < filled || size > m.boot.Memory {
			t.Errorf("%d bytes were written, %v", size, err)
		}
	}
	if _, now, err := p.Charged(); err != nil || now != limit {
		t.Errorf("its limit was %d and is %d, %v", limit, now, err)
	}
	if err := p.Resume(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestHostileHello: a vmm process that reports a version that never existed is
// killed.
func TestHostileHello(t *testing.T) {
	s := startHostile(t, "older")
	made := make(chan *vmmctl.Reply, 1)
	made <- &vmmctl.Reply{Data: []byte{1, 0}}
	if err := s.Made(made); !errors.Is(err, engine.ErrEnded) || !strings.Contains(err.Error(), "there is no version 0") {
		t.Errorf("it is believed: %v", err)
	}
}

// TestOlderVMM: the vmm process of an older AgentRun closes the connection on a
// message that it does not know. It is captured through files while it stands still,
// and lives on.
func TestOlderVMM(t *testing.T) {
	s := startHostile(t, "older")
	s.filesOnly = true
	if err := s.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The missing CPU profile is found only after everything was saved.
	_, err := s.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err == nil || !strings.Contains(err.Error(), "the machine has CPU profile") {
		t.Errorf("a capture: %v", err)
	}
	if _, err := s.Console(t.Context()); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// TestAnswersEarly: the wait for a vmm that claims to have written everything but
// keeps its pipes open is bounded.
func TestAnswersEarly(t *testing.T) {
	s := startHostile(t, "answers early")
	if err := s.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := s.Snapshot(ctx, filepath.Join(t.TempDir(), "snapshot")); !errors.Is(err, engine.ErrEnded) {
		t.Errorf("a capture: %v", err)
	}
	killedFor(t, s, "what it has saved cannot be")
}
