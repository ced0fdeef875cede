package microvm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// TestHoard: each capture hands files on the host's disk to a vmm, which can make
// each of them as long as its disk. A vmm that closes none of them is not captured
// again.
func TestHoard(t *testing.T) {
	s := startHostile(t, "hoards")
	var refused error
	for range 4 * maxLent {
		if _, refused = s.Fork(t.Context(), nil); refused != nil {
			break
		}
	}
	if refused == nil || !strings.Contains(refused.Error(), "files of disks that were handed to it") {
		t.Errorf("it was not refused: %v", refused)
	}
	kept := uint64(0)
	for _, path := range filesOf(t, s.Pid()) {
		name, err := os.Readlink(path)
		if err != nil || !strings.Contains(name, "/disk-") {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		kept += uint64(st.Blocks) * 512
	}
	if most := uint64(maxLent+2) * hostileDisk; kept > most {
		t.Errorf("it holds %d MiB on the host's disk with a disk of %d MiB, at most %d are possible", kept/mib, hostileDisk/mib, most/mib)
	}
	if err := s.Stopped(); err != nil {
		t.Errorf("it has ended: %v", err)
	}
}

// TestLentComeBack: an honest vmm can be captured any number of times, to files and
// to pipes.
func TestLentComeBack(t *testing.T) {
	j := openJail(t)
	e := jailedEngine(t, j.Jail, residentFolder(t))
	m := bareMachine(t)
	top, err := e.top()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = top.Close() }()
	stack := layer.Stack{Size: mib}
	m.addDisk(vmmctl.Disk{ID: "data", Stack: &stack}, top)
	p, err := m.start(j.Jail, engine.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	if err := p.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := &sandbox{
		Guest: &Guest{Process: p}, engine: e, vcpus: int(m.boot.VCPUs), memory: layer.Stack{Size: m.boot.Memory}, disks: []disk{{id: "data", stack: stack}},
	}
	for i := range 3 * maxLent {
		_, save := s.durable()
		c, err := s.freeze(t.Context(), save)
		if err != nil {
			t.Fatalf("to files, time %d: %v", i, err)
		}
		c.close()
		b, err := snapshot.NewBuilder(filepath.Join(t.TempDir(), "snapshot"))
		if err != nil {
			t.Fatal(err)
		}
		durable, save := s.durable()
		if c, err = s.drain(t.Context(), b, durable, save); err != nil {
			t.Fatalf("to pipes, time %d: %v", i, err)
		}
		c.close()
		if err := b.Abort(); err != nil {
			t.Fatal(err)
		}
	}
}
