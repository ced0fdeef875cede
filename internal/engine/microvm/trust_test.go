package microvm

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
)

// TestChargedAsItIs: the limit of a vmm is raised by what its file holds, not by
// what it says.
func TestChargedAsItIs(t *testing.T) {
	other := startBare(t, openJail(t)) // only for its cgroup
	s := startHostileIn(t, other.Cell(), "honest")
	t.Cleanup(func() { go other.Kill() }) // the end of each waits until the cgroup is empty
	_, before, err := s.Charged()
	if err != nil {
		t.Fatal(err)
	}
	if before == 0 {
		t.Skip("there are no cgroups")
	}
	m, _, err := s.captureLive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, during, err := s.Charged()
	if err != nil || during != before+page {
		t.Errorf("the limit was %d, and is %d with one page: %v", before, during, err)
	}
	if err := errors.Join(m.release(), s.release()); err != nil {
		t.Error(err)
	}
	// It may take a while to be lowered, and is not raised any more.
	if _, after, err := s.Charged(); err != nil || after > during {
		t.Errorf("the limit was %d, and is %d afterwards: %v", before, after, err)
	}
}

// TestHonestSave: what a real vmm says of a real guest is believed, again and
// again, with a disk, and so are the pages that it has touched.
func TestHonestSave(t *testing.T) {
	j := openJail(t)
	e := jailedEngine(t, j.Jail, residentFolder(t))
	top, err := e.top()
	if err != nil {
		t.Fatal(err)
	}
	machine, stack := bareMachine(t), layer.Stack{Size: mib}
	machine.addDisk(vmmctl.Disk{ID: "scratch", Stack: &stack}, top)
	p, err := machine.start(j.Jail, engine.Limits{})
	if err := errors.Join(err, top.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	s := &sandbox{
		engine: e, kernel: strings.Repeat("ab", 32), vcpus: int(machine.boot.VCPUs), Guest: &Guest{Process: p}, boot: &bootFiles{users: 2},
		memory: layer.Stack{Size: machine.boot.Memory}, disks: []disk{{id: "scratch", stack: stack}},
	}
	for range 3 {
		m, saved, err := s.captureLive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if saved.Copied == 0 || saved.Pause == 0 {
			t.Errorf("%+v", saved)
		}
		m.boot = nil
		if err := m.release(); err != nil {
			t.Error(err)
		}
	}
	snap, err := s.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(snap.Verify(t.Context()), snap.Close()); err != nil {
		t.Error(err)
	}
	if pages, err := p.Touched(t.Context()); err != nil || len(pages.Written) == 0 {
		t.Errorf("%v, %v", pages, err)
	}
	if err := s.live.release(); err != nil {
		t.Error(err)
	}
}

// TestReadsAreBounded: a guest that reads all of its memory does not have all later
// forks map it.
func TestReadsAreBounded(t *testing.T) {
	all := vmmctl.Touched{
		Written: []extent.Run{{Start: 0, Length: page}},
		Read:    []extent.Run{{Start: page, Length: (maxRead + 1) * page}},
	}
	if got := bounded(all); len(got.Written) != 1 || got.Read != nil {
		t.Errorf("%v", got)
	}
}
