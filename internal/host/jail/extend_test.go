package jail

import (
	"errors"
	"sync"
	"syscall"
	"testing"
)

// TestLimitIsReducedLater: if the memory is in use, the limit falls later, and to
// its old value. Giving it back twice lowers it once.
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
	g.use(310 * mib)
	for range 2 {
		if err := backs[0](); err != nil {
			t.Fatal(err)
		}
	}
	if limit := g.is(); limit != 500*mib {
		t.Errorf("with 310 MiB in use the limit is %d MiB", limit/mib)
	}
	c.budget.mu.Lock()
	settled := c.budget.settled
	c.budget.mu.Unlock()
	g.use(290 * mib)
	<-settled
	if limit := g.is(); limit != 300*mib {
		t.Errorf("later the limit is %d MiB, not 300", limit/mib)
	}
	g.use(10 * mib)
	if err := backs[1](); err != nil || g.is() != 100*mib {
		t.Errorf("in the end the limit is %d MiB, %v", g.is()/mib, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.tooLow {
		t.Error("a limit was set to less than was in use")
	}
}

// TestLimitFollows: while an owner keeps more memory than the target of its
// limit, the limit is only slightly above the memory in use.
func TestLimitFollows(t *testing.T) {
	g := &countedGroup{limit: 500 * mib, usage: 200 * mib}
	b := budget{base: 100 * mib}
	for _, tt := range []struct{ usage, limit uint64 }{{200 * mib, 216 * mib}, {150 * mib, 166 * mib}, {160 * mib, 166 * mib}} {
		g.use(tt.usage)
		b.mu.Lock()
		err := b.adjust(g, true)
		b.mu.Unlock()
		if !errors.Is(err, errInUse) || g.is() != tt.limit {
			t.Errorf("%d MiB in use: the limit is %d MiB, want %d: %v", tt.usage/mib, g.is()/mib, tt.limit/mib, err)
		}
	}
	g.use(100 * mib)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.adjust(g, true); err != nil || g.is() != 100*mib {
		t.Errorf("the limit is %d MiB, %v", g.is()/mib, err)
	}
}

// TestLimitOfAnOwnerThatIsLeft: the limit is no longer lowered once another
// process manages the owner.
func TestLimitOfAnOwnerThatIsLeft(t *testing.T) {
	g := &countedGroup{limit: 100 * mib}
	c := &Cell{group: g}
	back, err := c.Extend(200 * mib)
	if err != nil {
		t.Fatal(err)
	}
	g.use(250 * mib)
	if err := back(); err != nil {
		t.Fatal(err)
	}
	c.budget.mu.Lock()
	settled := c.budget.settled
	c.budget.mu.Unlock()
	c.Leave()
	<-settled
	g.use(10 * mib)
	if limit := g.is(); limit != 300*mib {
		t.Errorf("the limit is %d MiB", limit/mib)
	}
}

// countedGroup is a cgroup that consists of two numbers.
type countedGroup struct {
	mu           sync.Mutex // protects all following fields
	usage, limit uint64
	tooLow       bool // a limit was set below the memory in use
}

func (g *countedGroup) use(bytes uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.usage = bytes
}

func (g *countedGroup) is() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.limit
}

func (g *countedGroup) memory() (usage, limit uint64, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.usage, g.limit, nil
}

func (g *countedGroup) setMemory(limit uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limit, g.tooLow = limit, g.tooLow || limit < g.usage
	return nil
}

func (g *countedGroup) lowerMemory(limit uint64) error {
	if usage, _, _ := g.memory(); limit < usage {
		return errInUse
	}
	return g.setMemory(limit)
}

func (*countedGroup) set(Limits) error                                { return nil }
func (*countedGroup) bornInside(*syscall.SysProcAttr) (func(), error) { return func() {}, nil }
func (*countedGroup) add(int) error                                   { return nil }
func (*countedGroup) oomKills() (uint64, error)                       { return 0, nil }
