package node

import "agentrun.dev/internal/sandbox"

// maxBuilds is how many builds of a namespace may be under way, wait for their turn or be
// tried again. Each has a log that is open.
const maxBuilds = 64

// buildPlaces counts the builds of each namespace that were admitted. A build has its place
// from before its template is in the journal until its end: whoever is admitted counts for
// the next. Several may hold the place of one build. The manager's mutex protects it.
type buildPlaces struct {
	holders map[buildKey]int
	used    map[sandbox.Namespace]int
}

func newBuildPlaces() buildPlaces {
	return buildPlaces{map[buildKey]int{}, map[sandbox.Namespace]int{}}
}

// full reports whether there is no place for one more build.
func (p buildPlaces) full(k buildKey) bool {
	return p.holders[k] == 0 && p.used[k.Template.Namespace] >= maxBuilds
}

func (p buildPlaces) hold(k buildKey) {
	if p.holders[k]++; p.holders[k] == 1 {
		p.used[k.Template.Namespace]++
	}
}

// leave reports whether the place is free.
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
// the build has one of its own, or is not begun.
func (m *Manager) admitBuild(k buildKey) (leave func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.places.full(k) {
		return nil, errTooManyBuilds(k.Template.Namespace)
	}
	return m.holdPlace(k), nil
}

// holdPlace takes a place for a build whether or not there is one. It is called with the
// mutex, leave without.
func (m *Manager) holdPlace(k buildKey) (leave func()) {
	m.places.hold(k)
	return func() {
		m.mu.Lock()
		free := m.places.leave(k)
		m.mu.Unlock()
		if free {
			m.noticePools() // one of them may wait for it
		}
	}
}

// errTooManyBuilds refuses a build of a namespace that has enough.
func errTooManyBuilds(n sandbox.Namespace) error {
	return sandbox.Errorf(sandbox.CodeCapacity, "too many templates of namespace %s wait to be built", n).
		Because("a namespace has at most %d builds under way or waiting", maxBuilds).
		Try("Try again when some are ready, or delete templates")
}
