package dns

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"
)

// Limits bound the questions of one sandbox.
type Limits struct {
	// Rate and Burst bound queries per second.
	Rate, Burst int
	// Pending bounds the queries that wait for upstreams at once. Otherwise names
	// whose servers never answer could take all the room that the sandboxes of a
	// process share.
	Pending int
	// WildcardNames and WildcardBytes bound the number of different names below one
	// wildcard, and the sum of their lengths, that are asked for within
	// WildcardWindow. Without these bounds, names would be a way to send data to the
	// operator of the domain's servers.
	WildcardNames, WildcardBytes int
	WildcardWindow               time.Duration
}

// DefaultLimits are enough for package managers and browsers.
func DefaultLimits() Limits {
	return Limits{Rate: 100, Burst: 400, Pending: 64, WildcardNames: 128, WildcardBytes: 8 << 10, WildcardWindow: 10 * time.Minute}
}

// meter counts one sandbox's questions. Its zero value with limits is ready.
type meter struct {
	limits Limits

	mu        sync.Mutex
	tokens    float64              // mu protects it and all following fields
	refilled  time.Time            // when tokens was last computed
	pending   int                  // queries that wait for upstreams
	wildcards map[string]*wildcard // by pattern
	// inherited are names that the source had resolved. They do not count until
	// freeUntil.
	inherited map[string]struct{}
	freeUntil time.Time
}

// wildcard counts the names asked for below one pattern since began.
type wildcard struct {
	began time.Time
	names map[string]struct{}
	count int // names, including those that the source had asked for
	bytes int
	// inherited is set if the source has begun the count.
	inherited bool
}

// WildcardUse is the use of one pattern since Began. The bound covers a sandbox
// together with all sandboxes that it continues from. Otherwise every fork could send
// as much data again.
type WildcardUse struct {
	Pattern      string
	Began        time.Time
	Names, Bytes int
}

// inherit starts with the uses of the source.
func (m *meter) inherit(uses []WildcardUse, names []string, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, u := range uses {
		if u.Began.After(now) {
			u.Began = now // the source's clock was ahead
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

// uses returns the uses whose window has not passed, in a stable order.
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

// begin takes one of the queries that may wait at once. end returns it.
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

// begun returns the initial count of a new pattern. A fork's policy may word a rule
// of its source's policy differently; then the count continues the source's. The
// caller holds m.mu.
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

// domainOf returns the domain of a wildcard rule, without protocol and port.
func domainOf(pattern string) string {
	if _, rest, ok := strings.Cut(pattern, "://"); ok {
		pattern = rest
	}
	host, _, _ := strings.Cut(pattern, ":")
	return strings.TrimPrefix(host, "*.")
}

// name counts a name below a pattern. A name that was asked for within the window
// does not count again.
func (m *meter) name(pattern, name string, now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.wildcards[pattern]
	if w == nil || now.Sub(w.began) >= m.limits.WildcardWindow {
		if m.wildcards == nil {
			m.wildcards = make(map[string]*wildcard)
		}
		for other, w := range m.wildcards { // patterns change with policies
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
