package gvisor

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"agentrun.dev/internal/codec"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/programs"
	"agentrun.dev/internal/storage/layer"
)

func TestProcessor(t *testing.T) {
	p, err := hostProcessor()
	if err != nil {
		t.Fatal(err)
	}
	if missing := p.lacks(p.features); len(missing) > 0 {
		t.Errorf("this processor lacks what it has: %v", missing)
	}
	if missing := p.lacks([]string{"no-such-feature", p.features[0]}); !slices.Equal(missing, []string{"no-such-feature"}) {
		t.Errorf("it lacks %v", missing)
	}
}

// TestLimits: the limit covers the requested memory, the disk and the sentry.
func TestLimits(t *testing.T) {
	s := shape{memory: 160 << 20, disk: 16 << 20, vcpus: 2}
	l := s.limits(engine.Limits{})
	if want := uint64(160+16+11+160) << 20; l.Memory != want || l.MilliCPUs != 3000 || l.Threads == 0 {
		t.Errorf("%+v, want %d bytes", l, want)
	}
	if l := s.limits(engine.Limits{MilliCPUs: 500, Background: true}); l.MilliCPUs != 500 || !l.Background {
		t.Errorf("%+v", l)
	}
}

// TestReserve: a requested disk counts as memory.
func TestReserve(t *testing.T) {
	e := &Engine{}
	if without, with := e.Reserve(160, 0), e.Reserve(160, 320); without != 170+usualOverhead || with != 510+usualOverhead {
		t.Error(without, with)
	}
	if n, err := e.MaxDisk(); err != nil || n < 64<<20 {
		t.Error(n, err)
	}
}

func TestDiskSize(t *testing.T) {
	if n := diskSize(engine.Spec{Memory: 100, Disk: 10, Scratch: 7}); n != 17 {
		t.Error(n)
	}
	if n := diskSize(engine.Spec{Memory: 100, Scratch: 7}); n != 7 {
		t.Error(n)
	}
	if n := diskSize(engine.Spec{Memory: 100}); n != 50 {
		t.Error(n)
	}
}

// TestState: the small files of a checkpoint are decoded unchanged.
func TestState(t *testing.T) {
	var c checkpoint
	var err error
	if c.state, err = memoryFile("state", []byte("the state")); err != nil {
		t.Fatal(err)
	}
	if c.meta, err = memoryFile("meta", nil); err != nil {
		t.Fatal(err)
	}
	defer c.close()
	b, err := encodeState(c)
	if err != nil {
		t.Fatal(err)
	}
	d := codec.NewDecoder(b)
	d.Version(stateVersion)
	state, meta := string(d.View(100)), string(d.View(100))
	if err := d.Finish(); err != nil || state != "the state" || meta != "" {
		t.Errorf("%q, %q, %v", state, meta, err)
	}
}

// TestOwnStats: the memory of a process and its descendants is read. For a process
// that does not exist, an error is returned.
func TestOwnStats(t *testing.T) {
	st, err := ProcessStats(os.Getpid())
	if err != nil || st.Own == 0 || st.Proportional < st.Own {
		t.Errorf("%+v, %v", st, err)
	}
	if _, err := ProcessStats(1 << 30); err == nil {
		t.Error("a process that is not there has memory")
	}
}

// TestProgramOfCapture: a helper's program is kept until the snapshot records that it
// needs the program, even if the helper has ended meanwhile.
func TestProgramOfCapture(t *testing.T) {
	path := filepath.Join(t.TempDir(), "helper")
	store, err := programs.Open(t.TempDir(), "helper")
	if err := errors.Join(err, os.WriteFile(path, []byte("a program"), 0o700)); err != nil {
		t.Fatal(err)
	}
	p, err := store.Keep(path)
	if err != nil {
		t.Fatal(err)
	}
	collect := func() (there bool) {
		t.Helper()
		if err := store.Collect(func() (map[layer.Digest]bool, error) { return nil, nil }); err != nil {
			t.Fatal(err)
		}
		return store.Has(p.Digest)
	}
	ended := errors.New("it has ended")
	s := &sandbox{process: &process{program: p}, build: p.Digest}
	s.engine = &Engine{features: func() (*processor, error) {
		s.dropProgram()
		if !collect() {
			t.Error("it is gone during the capture")
		}
		return nil, ended
	}}
	if _, err := s.Snapshot(t.Context(), filepath.Join(t.TempDir(), "snapshot")); !errors.Is(err, ended) {
		t.Errorf("%v", err)
	}
	if collect() {
		t.Error("it is kept after the capture")
	}
}
