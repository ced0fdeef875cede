package jail

import (
	"syscall"
	"testing"
)

// TestReducedWhileInUse: memory that is given back but still in use does not
// get its owner killed, which a limit below it would do.
func TestReducedWhileInUse(t *testing.T) {
	j := open(t, config(t))
	p := start(t, j, Limits{Memory: 48 * mib, MilliCPUs: 1000, Threads: 64})
	back, err := p.Cell.Extend(64 * mib)
	if err != nil {
		t.Fatal(err)
	}
	p.order(t, "fill", 0, 64*mib)
	if said := p.answer(t); said != `"ok"` {
		t.Fatalf("%q, stderr %q", said, p.said(t))
	}
	if err := back(); err != nil {
		t.Error(err)
	}
	if usage, limit, err := p.Cell.Memory(); err != nil || limit < usage || limit > 112*mib {
		t.Errorf("the limit is %d, %d are in use: %v", limit, usage, err)
	}
	if status, kills := p.end(t, false); kills != 0 {
		t.Errorf("%d kills, %#x", kills, status)
	}
}

// TestLimitIsReducedLater: what could not be taken back is taken later, and all
// of it.
func TestLimitIsReducedLater(t *testing.T) {
	g := &countedGroup{limit: 100 * mib}
	c := &Cell{group: g}
	var backs []func() error
	for range 2 {
		back, err := c.Extend(200 * mib)
		if err != nil {
			t.Fatal(err)
		}
		backs = append(backs, back)
	}
	for i, tt := range []struct {
		usage, limit uint64
	}{{450 * mib, 466 * mib}, {200 * mib, 216 * mib}} {
		g.usage = tt.usage
		if err := backs[i](); err != nil {
			t.Fatal(err)
		}
		if g.limit != tt.limit {
			t.Errorf("%d MiB in use: the limit is %d MiB, want %d", tt.usage/mib, g.limit/mib, tt.limit/mib)
		}
	}
	g.usage = 10 * mib
	back, err := c.Extend(50 * mib)
	if err != nil || g.limit != 150*mib {
		t.Errorf("the limit is %d MiB, %v", g.limit/mib, err)
	}
	if err := back(); err != nil || g.limit != 100*mib {
		t.Errorf("in the end the limit is %d MiB, %v", g.limit/mib, err)
	}
}

// countedGroup is a cgroup that is just two numbers.
type countedGroup struct{ usage, limit uint64 }

func (g *countedGroup) memory() (usage, limit uint64, err error)      { return g.usage, g.limit, nil }
func (g *countedGroup) setMemory(limit uint64) error                  { g.limit = limit; return nil }
func (*countedGroup) set(Limits) error                                { return nil }
func (*countedGroup) bornInside(*syscall.SysProcAttr) (func(), error) { return func() {}, nil }
func (*countedGroup) add(int) error                                   { return nil }
func (*countedGroup) oomKills() (uint64, error)                       { return 0, nil }
