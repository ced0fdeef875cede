package dns

import (
	"sync"
	"time"
)

// Limits bound what one sandbox asks.
type Limits struct {
	// Rate and Burst bound queries per second.
	Rate, Burst int
	// Pending bounds the queries that wait for upstreams at one time: a name whose servers
	// never answer must not take all the room that the sandboxes of a process share.
	Pending int
	// WildcardNames and WildcardBytes bound the different names below one wildcard, and the
	// sum of their lengths, that are asked for within WildcardWindow: names are a way to send
	// data to whoever runs the domain's servers.
	WildcardNames, WildcardBytes int
	WildcardWindow               time.Duration
}

// DefaultLimits let package managers and browsers work.
func DefaultLimits() Limits {
	return Limits{Rate: 100, Burst: 400, Pending: 64, WildcardNames: 128, WildcardBytes: 8 << 10, WildcardWindow: 10 * time.Minute}
}

// meter counts one sandbox's questions. Its zero value with limits is ready.
type meter struct {
	limits Limits

	mu        sync.Mutex
	tokens    float64              // mu protects it and all following fields
	refilled  time.Time            // when tokens was right
	pending   int                  // queries that wait for upstreams
	wildcards map[string]*wildcard // by pattern
}

// wildcard is what was asked for below one pattern since began.
type wildcard struct {
	began time.Time
	names map[string]struct{}
	bytes int
}

// query takes one query from the sandbox's rate.
func (m *meter) query(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refilled.IsZero() {
		m.tokens = float64(m.limits.Burst)
	} else {
		m.tokens = min(float64(m.limits.Burst), m.tokens+now.Sub(m.refilled).Seconds()*float64(m.limits.Rate))
	}
	m.refilled = now
	if m.tokens < 1 {
		return false
	}
	m.tokens--
	return true
}

// begin takes one of the queries that may wait at one time, and end gives it back.
func (m *meter) begin() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.pending >= m.limits.Pending {
		return false
	}
	m.pending++
	return true
}

func (m *meter) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pending--
}

// name counts a name below a pattern. One that was asked for within the window is free.
func (m *meter) name(pattern, name string, now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.wildcards[pattern]
	if w == nil || now.Sub(w.began) >= m.limits.WildcardWindow {
		if m.wildcards == nil {
			m.wildcards = make(map[string]*wildcard)
		}
		for other, w := range m.wildcards { // patterns come and go with policies
			if now.Sub(w.began) >= m.limits.WildcardWindow {
				delete(m.wildcards, other)
			}
		}
		w = &wildcard{began: now, names: make(map[string]struct{})}
		m.wildcards[pattern] = w
	}
	if _, known := w.names[name]; known {
		return true
	}
	if len(w.names) >= m.limits.WildcardNames || w.bytes+len(name) > m.limits.WildcardBytes {
		return false
	}
	w.names[name] = struct{}{}
	w.bytes += len(name)
	return true
}
