package dns

import (
	"cmp"
	"slices"
	"strings"
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
	// inherited are names that the source had resolved; they are free until freeUntil.
	inherited map[string]struct{}
	freeUntil time.Time
}

// wildcard is what was asked for below one pattern since began.
type wildcard struct {
	began time.Time
	names map[string]struct{}
	count int // of names, and of those that the source had asked for
	bytes int
	// inherited is set if the source has begun it.
	inherited bool
}

// WildcardUse is what was asked for below one pattern since Began. The bound is of a sandbox
// with all that it continues from: else every fork could send as much again.
type WildcardUse struct {
	Pattern      string
	Began        time.Time
	Names, Bytes int
}

// inherit begins with what the source has used.
func (m *meter) inherit(uses []WildcardUse, names []string, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, u := range uses {
		if u.Began.After(now) {
			u.Began = now // of a clock that was ahead
		}
		if now.Sub(u.Began) >= m.limits.WildcardWindow {
			continue
		}
		if m.wildcards == nil {
			m.wildcards = make(map[string]*wildcard)
		}
		m.wildcards[u.Pattern] = &wildcard{began: u.Began, names: make(map[string]struct{}), count: u.Names, bytes: u.Bytes, inherited: true}
	}
	if len(m.wildcards) == 0 || len(names) == 0 {
		return
	}
	m.inherited, m.freeUntil = make(map[string]struct{}, len(names)), now.Add(m.limits.WildcardWindow)
	for _, name := range names {
		m.inherited[name] = struct{}{}
	}
}

// uses are those whose window has not passed, in an order that does not vary.
func (m *meter) uses(now time.Time) (out []WildcardUse) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for pattern, w := range m.wildcards {
		if now.Sub(w.began) < m.limits.WildcardWindow {
			out = append(out, WildcardUse{Pattern: pattern, Began: w.began, Names: w.count, Bytes: w.bytes})
		}
	}
	slices.SortFunc(out, func(a, b WildcardUse) int { return cmp.Compare(a.Pattern, b.Pattern) })
	return out
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

// begun is what a pattern that is new begins with. A fork's policy may say in other words what
// its source's said: then that has begun it. The caller holds m.mu.
func (m *meter) begun(pattern string, now time.Time) *wildcard {
	w := &wildcard{began: now, names: make(map[string]struct{})}
	domain := domainOf(pattern)
	for other, source := range m.wildcards {
		if d := domainOf(other); source.inherited && source.count > w.count && (d == domain || below(d, domain) || below(domain, d)) {
			w.began, w.count, w.bytes, w.inherited = source.began, source.count, source.bytes, true
		}
	}
	return w
}

// domainOf is the domain of a rule with a wildcard, without protocol and port.
func domainOf(pattern string) string {
	if _, rest, ok := strings.Cut(pattern, "://"); ok {
		pattern = rest
	}
	host, _, _ := strings.Cut(pattern, ":")
	return strings.TrimPrefix(host, "*.")
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
		w = m.begun(pattern, now)
		m.wildcards[pattern] = w
	}
	if _, known := w.names[name]; known {
		return true
	}
	if m.inherited != nil && !now.Before(m.freeUntil) {
		m.inherited = nil
	}
	if _, known := m.inherited[name]; known {
		return true
	}
	if w.count >= m.limits.WildcardNames || w.bytes+len(name) > m.limits.WildcardBytes {
		return false
	}
	w.names[name] = struct{}{}
	w.count++
	w.bytes += len(name)
	return true
}
