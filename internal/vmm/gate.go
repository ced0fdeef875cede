package vmm

import (
	"sync"
	"time"
)

// gate lets vCPUs run, holds them, or ends them. A vCPU comes to the gate only
// after KVM_RUN returned EINTR, when no port or memory access of the guest is
// half done.
type gate struct {
	mu     sync.Mutex // protects all following fields
	change *sync.Cond
	held   bool // vCPUs wait at the gate
	closed bool // vCPUs leave for good
	parked int  // how many vCPUs wait at the gate now
	gone   int  // how many vCPUs have left for good

	// since is when the first of the waiting vCPUs arrived. lasted is the
	// length of the previous hold, until its last vCPU continued.
	since  time.Time
	lasted time.Duration
}

func newGate() *gate {
	g := &gate{held: true}
	g.change = sync.NewCond(&g.mu)
	return g
}

// pass holds the vCPU while the gate is held. It returns false if the vCPU must
// end.
func (g *gate) pass(c *vcpu) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held && !g.closed {
		if g.parked == 0 {
			g.since = time.Now()
		}
		g.parked++
		g.change.Broadcast()
		for g.held && !g.closed {
			g.change.Wait()
		}
		if g.parked--; g.parked == 0 {
			g.lasted = time.Since(g.since)
			g.change.Broadcast()
		}
	}
	if g.closed {
		g.gone++
		g.change.Broadcast()
		return false
	}
	c.kvm.SetImmediateExit(false)
	return true
}

// hold asks the vCPUs to stop and waits until all stand still. It returns false
// if the gate is closed.
func (g *gate) hold(vcpus []*vcpu) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = true
	for _, c := range vcpus {
		c.kick()
	}
	for g.parked < len(vcpus) && !g.closed {
		g.change.Wait()
	}
	return !g.closed
}

// release lets the held vCPUs continue.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = false
	g.change.Broadcast()
}

// stood waits until all released vCPUs have continued, and returns how long
// they were held.
func (g *gate) stood() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.parked > 0 && !g.held && !g.closed {
		g.change.Wait()
	}
	return g.lasted
}

// close ends all vCPUs. It does not wait, because a vCPU thread may call it.
func (g *gate) close(vcpus []*vcpu) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for _, c := range vcpus {
		c.kick()
	}
	g.change.Broadcast()
}

// waitGone waits until n vCPUs have left for good.
func (g *gate) waitGone(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.gone < n {
		g.change.Wait()
	}
}
