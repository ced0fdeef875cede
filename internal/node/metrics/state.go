package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// Source is the source for the present state of a node, such as *node.Manager.
type Source interface {
	Overview() node.Overview
	Memory() (map[sandbox.Key]node.PoolMemory, error)
}

// Watch makes scrapes read a source.
func (m *Metrics) Watch(s Source) {
	m.registry.MustRegister(&state{metrics: m, source: s})
}

// memoryAge bounds the age of the numbers about memory: reading them takes time
// for each machine.
const memoryAge = 5 * time.Second

// state reads a source when it is scraped.
type state struct {
	metrics *Metrics
	source  Source

	mu     sync.Mutex // protects all following fields
	read   time.Time  // when memory was read
	memory map[sandbox.Key]node.PoolMemory
	err    error
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

var (
	descActive    = describe("active_sandboxes", "Sandboxes that have a machine, or are about to.", labelNamespace, labelPool, labelEngine)
	descSandboxes = describe("sandboxes", "Sandboxes that have not ended, by state.", labelNamespace, labelPool, labelEngine, "state")
	descReady     = describe("pool_ready_snapshots", "Sandboxes of the template's current revision that wait to be claimed.", labelNamespace, labelPool, labelEngine)
	descWaiting   = describe("pool_ready_sandboxes", "Sandboxes of any revision that wait to be claimed.", labelNamespace, labelPool, labelEngine)
	descReplicas  = describe("pool_replicas", "Sandboxes that are to wait.", labelNamespace, labelPool, labelEngine)
	descPhase     = describe("pool_phase", "1 for the phase that a pool is in.", labelNamespace, labelPool, labelEngine, "phase")
	descShared    = describe("memory_shared_bytes", "Memory that machines of a pool have in common, counted once. 0 where the engine shares none.", labelNamespace, labelPool, labelEngine)
	descUnique    = describe("memory_unique_bytes", "Memory that machines of a pool have each for itself.", labelNamespace, labelPool, labelEngine)
	descMachines  = describe("machines", "Machines of a pool: those of sandboxes and those that wait.", labelNamespace, labelPool, labelEngine)
	descCapacity  = describe("capacity_bytes", "Memory that machines may reserve together.", labelEngine)
	descReserved  = describe("reserved_bytes", "Memory that machines have reserved.", labelEngine)
	descBuilds    = describe("builds_in_progress", "Templates that are being built.", labelEngine)
	descTurns     = describe("turns_held", "Turns that are taken, by kind of work: start of a machine, build of a template, capture of a sandbox.", labelEngine, labelWork)
	descQueue     = describe("turns_waiting", "Requests that wait for a turn, by kind of work. Pools that are filled do not count.", labelEngine, labelWork)
	descFree      = describe("storage_free_bytes", "Free room on the disk of the state folder, for the daemon's user.")
	descReserve   = describe("storage_reserve_bytes", "Room on that disk that is kept free of what tenants store.")
)

// labelWork is the kind of work that is done in turns.
const labelWork = "work"

// Describe implements prometheus.Collector.
func (s *state) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descActive, descSandboxes, descReady, descWaiting, descReplicas, descPhase, descShared, descUnique,
		descMachines, descCapacity, descReserved, descBuilds, descTurns, descQueue, descFree, descReserve,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (s *state) Collect(out chan<- prometheus.Metric) {
	now := s.source.Overview()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(descCapacity, float64(now.Capacity), s.metrics.engine)
	gauge(descReserved, float64(now.Reserved), s.metrics.engine)
	gauge(descBuilds, float64(now.Builds), s.metrics.engine)
	for work, t := range now.Turns {
		gauge(descTurns, float64(t.Held), s.metrics.engine, string(work))
		gauge(descQueue, float64(t.Waiting), s.metrics.engine, string(work))
	}
	gauge(descFree, float64(now.StorageFree))
	gauge(descReserve, float64(now.StorageReserve))
	memory, err := s.readMemory()
	if err != nil {
		out <- prometheus.NewInvalidMetric(descUnique, err)
	}
	for _, p := range now.Pools {
		labels := []string{string(p.Namespace), string(p.Name), s.metrics.engine}
		active := 0
		for _, state := range []sandbox.State{
			sandbox.Starting, sandbox.Running, sandbox.Paused, sandbox.Hibernating, sandbox.Hibernated, sandbox.Resuming,
		} {
			n := p.Sandboxes[state]
			gauge(descSandboxes, float64(n), append(labels, string(state))...)
			if state != sandbox.Hibernated {
				active += n
			}
		}
		gauge(descActive, float64(active), labels...)
		gauge(descShared, float64(memory[p.Key].Shared), labels...)
		gauge(descUnique, float64(memory[p.Key].Unique), labels...)
		gauge(descMachines, float64(memory[p.Key].Machines), labels...)
		if !p.Exists {
			continue
		}
		gauge(descReady, float64(p.Snapshots), labels...)
		gauge(descWaiting, float64(p.Ready), labels...)
		gauge(descReplicas, float64(p.Replicas), labels...)
		for _, phase := range []sandbox.Phase{sandbox.PhasePending, sandbox.PhaseBuilding, sandbox.PhaseReady, sandbox.PhaseFailed} {
			is := 0.0
			if p.Phase == phase {
				is = 1
			}
			gauge(descPhase, is, append(labels, string(phase))...)
		}
	}
	s.metrics.forget(now.Pools)
}

// readMemory reads the memory of all machines, unless the last numbers are
// recent.
func (s *state) readMemory() (map[sandbox.Key]node.PoolMemory, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.read.IsZero() || time.Since(s.read) > memoryAge {
		s.memory, s.err = s.source.Memory()
		s.read = time.Now()
	}
	return s.memory, s.err
}

// goneFor is for how many scrapes the series of a pool outlive it, so that its
// last changes are still scraped.
const goneFor = 2

// forget drops the series of pools that no longer exist. Otherwise a client
// that makes and deletes pools could make an unbounded number of series.
func (m *Metrics) forget(pools []node.PoolOverview) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k := range m.seen {
		m.seen[k]++
	}
	for _, p := range pools {
		m.seen[p.Key] = 0
	}
	for k, gone := range m.seen {
		if gone <= goneFor {
			continue
		}
		delete(m.seen, k)
		for _, c := range m.ofPools {
			c.DeletePartialMatch(prometheus.Labels{labelNamespace: string(k.Namespace), labelPool: string(k.Name)})
		}
	}
}
