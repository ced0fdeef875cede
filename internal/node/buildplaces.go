package node

import "agentrun.dev/internal/sandbox"

// maxBuilds is how many builds of a namespace may be under way, wait for their turn or
// wait to be tried again. Each has an open log.
const maxBuilds = 64

// buildPlaces counts the admitted builds of each namespace. A build has its place from the
// time before its template is in the journal until its end, so it counts for the next call.
// Several callers may hold the place of one build. The manager's mutex protects it.
type buildPlaces struct {
	holders map[buildKey]int
	used    map[sandbox.Namespace]int
}

func newBuildPlaces() buildPlaces {
	return buildPlaces{map[buildKey]int{}, map[sandbox.Namespace]int{}}
}

// full reports whether a build has no place and cannot get one.
func (p buildPlaces) full(k buildKey) bool {
	return p.holders[k] == 0 && p.used[k.Template.Namespace] >= maxBuilds
}

func (p buildPlaces) hold(k buildKey) {
	if p.holders[k]++; p.holders[k] == 1 {
		p.used[k.Template.Namespace]++
	}
}

// leave gives back a hold, and reports whether the place is free now.
func (p buildPlaces) leave(k buildKey) (free bool) {
	if p.holders[k]--; p.holders[k] > 0 {
		return false
	}
	delete(p.holders, k)
	n := k.Template.Namespace
	if p.used[n]--; p.used[n] == 0 {
		delete(p.used, n)
	}
	return true
}

// admitBuild takes a place for a build, or refuses it. The caller gives the place back once
// the build has its own, or does not begin.
func (m *Manager) admitBuild(k buildKey) (leave func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.places.full(k) {
		return nil, errTooManyBuilds(k.Template.Namespace)
	}
	return m.holdPlace(k), nil
}

// holdPlace takes a place for a build even if all are taken. The caller holds the mutex,
// but calls leave without it.
func (m *Manager) holdPlace(k buildKey) (leave func()) {
	m.places.hold(k)
	return func() {
		m.mu.Lock()
		free := m.places.leave(k)
		m.mu.Unlock()
		if free {
			m.noticePools() // a pool may wait for the place
		}
	}
}

// errTooManyBuilds refuses a build of a namespace whose places are all taken.
func errTooManyBuilds(n sandbox.Namespace) error {
	return sandbox.Errorf(sandbox.CodeCapacity, "too many templates of namespace %s wait to be built", n).
		Because("a namespace has at most %d builds under way or waiting", maxBuilds).
		Try("Try again when some are ready, or delete templates")
}
