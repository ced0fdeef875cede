package microvm

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
)

// TestDeadline: a vmm that does not answer is killed, whatever it was asked, and
// whoever still waits. How long it may take follows from what it has to copy.
func TestDeadline(t *testing.T) {
	s := startHostile(t, "silence")
	s.patience.Store(int64(10 * time.Millisecond))
	_, err := s.request(t.Context(), func(id uint64) vmmctl.Message { return &vmmctl.Load{ID: id} })
	if !errors.Is(err, engine.ErrEnded) {
		t.Error(err)
	}
	killedFor(t, s, "it has not answered Load within 10ms")
	s = startHostile(t, "silence")
	s.expect(600 * slowestCopy)
	if got, want := time.Duration(s.patience.Load()), answerTime+10*time.Minute; got != want {
		t.Errorf("it may take %v, not %v", got, want)
	}
	s.expect(1 << 62)
	if got := time.Duration(s.patience.Load()); got < answerTime || got > 25*time.Hour {
		t.Errorf("it may take %v", got)
	}
}

// TestSaveDeadline: Save has a deadline, too, which a caller does not shorten.
func TestSaveDeadline(t *testing.T) {
	s := startHostile(t, "silence")
	go func() {
		<-s.ready // it has got Save
		s.Process.mu.Lock()
		defer s.Process.mu.Unlock()
		for _, r := range s.waiting {
			r.timer.Reset(0) // time flies
		}
	}()
	if _, err := s.Fork(t.Context(), nil); !errors.Is(err, engine.ErrEnded) {
		t.Error(err)
	}
	killedFor(t, s, "it has not answered Save within 5m0s")
}

// TestAnswersAreNotOverdue: one that has answered, or was left alone, lives on.
func TestAnswersAreNotOverdue(t *testing.T) {
	s := startHostile(t, "honest")
	for range 3 {
		if err := s.Process.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(s.waiting); n != 0 {
		t.Errorf("%d requests wait", n)
	}
	s.left.Store(true)
	s.overdue(&vmmctl.Save{}, 0)
	s.left.Store(false)
	if err := s.Process.Pause(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestChargedAsItIs: the limit of a vmm is raised by what its file holds, not by
// what it says.
func TestChargedAsItIs(t *testing.T) {
	other := startBare(t, openJail(t)) // only for its cgroup
	s := startHostile(t, "honest")
	s.cell = other.cell
	_, before, err := s.cell.Memory()
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
	_, during, err := s.cell.Memory()
	if err != nil || during != before+page {
		t.Errorf("the limit was %d, and is %d with one page: %v", before, during, err)
	}
	if err := errors.Join(m.release(), s.release()); err != nil {
		t.Error(err)
	}
	// It may take a while to be lowered, and is not raised any more.
	if _, after, err := s.cell.Memory(); err != nil || after > during {
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
	machine, im := bareMachine(t), layer.Image{Size: mib}
	machine.addDisk(vmmctl.Disk{ID: "scratch", Image: &im}, top)
	p, err := machine.start(j.Jail, engine.Limits{})
	if err := errors.Join(err, top.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	s := &sandbox{
		engine: e, kernel: strings.Repeat("ab", 32), vcpus: int(machine.boot.VCPUs), Guest: &Guest{Process: p}, boot: &bootFiles{users: 2},
		memory: layer.Image{Size: machine.boot.Memory}, disks: []disk{{id: "scratch", image: im}},
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
	if pages, err := p.touched(t.Context()); err != nil || len(pages.Written) == 0 {
		t.Errorf("%v, %v", pages, err)
	}
	if err := s.live.release(); err != nil {
		t.Error(err)
	}
}

// TestKeptIsBounded: a vmm that maps all its old layers for ever does not raise its
// limit for ever.
func TestKeptIsBounded(t *testing.T) {
	s := startHostile(t, "honest")
	var backs []func() error
	for range maxKept + 1 {
		c, err := s.newCharged(hostileRAM)
		if err != nil {
			t.Fatal(err)
		}
		backs = append(backs, s.keep(c.size, c.back))
		if err := c.File.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if c, err := s.newCharged(hostileRAM); err == nil {
		t.Errorf("it may keep any number of layers, %v", c)
	}
	if err := backs[0](); err != nil {
		t.Error(err)
	}
	c, err := s.newCharged(hostileRAM)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
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
