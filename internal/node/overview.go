package node

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
)

// Overview describes the present state of a node.
type Overview struct {
	// Capacity is the memory for all machines, Reserved the part of it that is
	// taken, in bytes.
	Capacity, Reserved uint64
	// Builds is the number of builds under way.
	Builds int
	// StorageFree is the free space on the disk of the state folder. StorageReserve is
	// how much of the disk is kept free of data that tenants store. Both are in bytes.
	StorageFree, StorageReserve uint64
	// Turns are the queues of each kind of work.
	Turns map[Work]TurnsOverview
	// Pools are the pools that exist or still have sandboxes, in order.
	Pools []PoolOverview
}

// Work is a kind of work that is done in turns.
type Work string

// The kinds of work.
const (
	WorkStart   Work = "start"   // of a machine
	WorkBuild   Work = "build"   // of a template
	WorkCapture Work = "capture" // of a sandbox: a hibernation, a checkpoint, a fork
)

// PoolOverview describes one pool.
type PoolOverview struct {
	sandbox.Key
	// Exists is false for a deleted pool whose sandboxes still live.
	Exists   bool
	Replicas int
	sandbox.PoolStatus
	// Sandboxes is the number of sandboxes in each state.
	Sandboxes map[sandbox.State]int
}

// Overview reads everything from memory. It does not wait.
func (m *Manager) Overview() Overview {
	out := Overview{Capacity: m.cfg.Capacity, Reserved: m.capacity.reserved(), Turns: map[Work]TurnsOverview{
		WorkStart: m.turns.overview(), WorkBuild: m.buildTurns.overview(), WorkCapture: m.captureTurns.overview(),
	}}
	out.StorageReserve = m.cfg.StorageReserve
	if free, err := m.room.free(); err == nil { // a scrape cannot report the error
		out.StorageFree = free
	}
	m.mu.Lock()
	out.Builds = len(m.builds)
	running := maps.Clone(m.pools)
	m.mu.Unlock()
	byPool := map[sandbox.Key]*PoolOverview{}
	of := func(k sandbox.Key) *PoolOverview {
		if byPool[k] == nil {
			byPool[k] = &PoolOverview{Key: k, Sandboxes: map[sandbox.State]int{}}
		}
		return byPool[k]
	}
	for k, p := range running {
		o := of(k)
		o.Exists, o.PoolStatus = true, p.status()
		p.mu.Lock()
		o.Replicas = p.spec.Replicas
		p.mu.Unlock()
	}
	for _, b := range m.members() {
		s := b.now()
		of(s.PoolKey()).Sandboxes[s.State]++
	}
	for _, o := range byPool {
		out.Pools = append(out.Pools, *o)
	}
	slices.SortFunc(out.Pools, func(a, b PoolOverview) int { return cmp.Compare(a.String(), b.String()) })
	return out
}

// PoolMemory is the memory of a pool's machines, including waiting ones.
type PoolMemory struct {
	Machines int
	// Unique is memory that only one machine has. Shared is memory that several
	// machines share, counted once. With engines that do not share memory it is
	// 0.
	Unique, Shared uint64
}

// Memory asks the kernel for the memory of all machines, which takes some time
// for each. Machines that end meanwhile are left out.
func (m *Manager) Memory() (map[sandbox.Key]PoolMemory, error) {
	machines := map[sandbox.ID]sandbox.Key{}
	m.mu.Lock()
	maps.Copy(machines, m.parked)
	m.mu.Unlock()
	for _, b := range m.members() {
		if s := b.now(); s.Machine != "" {
			machines[s.Machine] = s.PoolKey()
		}
	}
	shares := m.cfg.Engine.Capabilities().SharesMemory
	out := map[sandbox.Key]PoolMemory{}
	var errs []error
	for id, pool := range machines {
		_, stats, err := m.cfg.Engine.Inspect(m.machineDir(id))
		if errors.Is(err, engine.ErrEnded) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		p := out[pool]
		p.Machines++
		if shares {
			p.Unique += stats.Own
			p.Shared += stats.Proportional - min(stats.Own, stats.Proportional)
		} else {
			p.Unique += stats.Proportional
		}
		out[pool] = p
	}
	return out, errors.Join(errs...)
}

// park records that a machine waits in a pool; unpark that it no longer does.
func (m *Manager) park(id sandbox.ID, pool sandbox.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.parked[id] = pool
}

func (m *Manager) unpark(id sandbox.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.parked, id)
}
