package vmmctl

import (
	"testing"
	"time"
)

// TestParents: a new parent waits for those that were gone, and for no others.
func TestParents(t *testing.T) {
	var p Parents
	_, alive := pair(t)
	p.Add(alive)()
	dead, child := pair(t)
	p.Add(child)()
	if err := dead.Send(&Simple{Kind: KindPause, ID: 1}); err != nil {
		t.Fatal(err)
	}
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	_, next := pair(t)
	wait := p.Add(next)
	served := make(chan struct{})
	go func() {
		wait()
		close(served)
	}()
	if m, _, err := child.Receive(); err != nil || m.(*Simple).Kind != KindPause {
		t.Errorf("%v, %v", m, err)
	}
	select {
	case <-served:
		t.Error("it was served before what a dead one had sent")
	default:
	}
	p.Remove(child)
	select {
	case <-served:
	case <-time.After(time.Minute):
		t.Fatal("it waits although the dead one was served")
	}
	all := map[*Conn]bool{}
	p.Each(func(c *Conn) { all[c] = true })
	if len(all) != 2 || !all[alive] || !all[next] {
		t.Errorf("%d parents, not those two that are there", len(all))
	}
	_, last := pair(t)
	p.Add(last)() // no parent is gone
}
