package node

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
)

// Overview is what a node has at the moment.
type Overview struct {
	// Capacity and Reserved are the memory of all machines, in bytes.
	Capacity, Reserved uint64
	// Builds is how many are under way.
	Builds int
	// Pools are all that exist or that sandboxes exist of, in order.
	Pools []PoolOverview
}

// PoolOverview is one pool.
type PoolOverview struct {
	sandbox.Key
	// Exists is false for one that was deleted while sandboxes of it live.
	Exists   bool
	Replicas int
	sandbox.PoolStatus
	// Sandboxes are how many there are in each state.
	Sandboxes map[sandbox.State]int
}

// Overview looks at everything, from memory: it does not wait for anybody.
func (m *Manager) Overview() Overview {
	out := Overview{Capacity: m.cfg.Capacity, Reserved: m.capacity.reserved()}
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

// PoolMemory is what the machines of a pool take, those that wait included.
type PoolMemory struct {
	Machines int
	// Unique is memory that each has alone, Shared what several machines have
	// together, counted once. Engines that share nothing have 0.
	Unique, Shared uint64
}

// Memory asks the kernel what all machines take, which costs some time for
// each. Machines that end meanwhile are left out.
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

// park notes that a machine waits in a pool; unpark that it does no more.
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
