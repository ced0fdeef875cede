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

// TestChargedAsItIs: the limit of a vmm is raised by the actual size of its file, not
// by the size that it reports.
func TestChargedAsItIs(t *testing.T) {
	other := startBare(t, openJail(t)) // only for its cgroup
	s := startHostileIn(t, other.Cell(), "honest")
	t.Cleanup(func() { go other.Kill() }) // each waits until the shared cgroup is empty
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
	// Lowering the limit may take a while. It is not raised any further.
	if _, after, err := s.Charged(); err != nil || after > during {
		t.Errorf("the limit was %d, and is %d afterwards: %v", before, after, err)
	}
}

// TestHonestSave: the answers of a real vmm about a real guest are accepted, several
// times, with a disk and with the touched pages.
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

// TestReadsAreBounded: if a guest reads all of its memory, later forks do not map all
// of it.
func TestReadsAreBounded(t *testing.T) {
	all := vmmctl.Touched{
		Written: []extent.Run{{Start: 0, Length: page}},
		Read:    []extent.Run{{Start: page, Length: (maxRead + 1) * page}},
	}
	if got := bounded(all); len(got.Written) != 1 || got.Read != nil {
		t.Errorf("%v", got)
	}
}
