package node

import (
	"slices"
	"strings"

	"agentrun.dev/internal/sandbox"
)

// roster has the sandboxes that have not ended, by id, by name and in the order of
// lists. It is used under the manager's mutex, so no method of it walks through all of
// them.
type roster struct {
	byID   map[sandbox.ID]*member
	spaces map[sandbox.Namespace]*space
	// tokens has the sandboxes whose tokens the node has not derived.
	tokens map[sandbox.TokenHash]*member
}

// space has the sandboxes of one namespace.
type space struct {
	byName map[sandbox.Name]*member
	order  []*member // by position
}

func newRoster() roster {
	return roster{map[sandbox.ID]*member{}, map[sandbox.Namespace]*space{}, map[sandbox.TokenHash]*member{}}
}

func (r roster) get(k sandbox.Key) *member {
	if s := r.spaces[k.Namespace]; s != nil {
		return s.byName[k.Name]
	}
	return nil
}

func (r roster) add(b *member) {
	s := r.spaces[b.key.Namespace]
	if s == nil {
		s = &space{byName: map[sandbox.Name]*member{}}
		r.spaces[b.key.Namespace] = s
	}
	r.byID[b.id], s.byName[b.key.Name] = b, b
	if b.token != "" {
		r.tokens[b.token] = b
	}
	s.order = slices.Insert(s.order, s.after(b.position), b)
}

// remove removes a sandbox that was added. Another one may have its name by
// now.
func (r roster) remove(b *member) {
	s := r.spaces[b.key.Namespace]
	if r.byID[b.id] != b || s == nil {
		return
	}
	delete(r.byID, b.id)
	if r.tokens[b.token] == b {
		delete(r.tokens, b.token)
	}
	if s.byName[b.key.Name] == b {
		delete(s.byName, b.key.Name)
	}
	at, _ := slices.BinarySearchFunc(s.order, b.position, comparePosition)
	if s.order = slices.Delete(s.order, at, at+1); len(s.order) == 0 {
		delete(r.spaces, b.key.Namespace)
	}
}

func (r roster) count(n sandbox.Namespace) int {
	if s := r.spaces[n]; s != nil {
		return len(s.order)
	}
	return 0
}

func comparePosition(b *member, position string) int { return strings.Compare(b.position, position) }

// after is the index of the first sandbox after a position.
func (s *space) after(position string) int {
	at, found := slices.BinarySearchFunc(s.order, position, comparePosition)
	if found {
		at++
	}
	return at
}

// rosterStep is how many sandboxes are read from the roster before the mutex is
// released for a moment.
const rosterStep = 128

// eachMember calls f with the sandboxes of a namespace after a position, in order, until
// f returns false.
func (m *Manager) eachMember(n sandbox.Namespace, after string, f func(*member) bool) {
	for {
		var some []*member
		m.mu.Lock()
		if s := m.roster.spaces[n]; s != nil {
			at := s.after(after)
			some = slices.Clone(s.order[at:min(at+rosterStep, len(s.order))])
		}
		m.mu.Unlock()
		for _, b := range some {
			if after = b.position; !f(b) {
				return
			}
		}
		if len(some) < rosterStep {
			return
		}
	}
}

// eachMemberOf walks through the sandboxes of a namespace after a position, in order.
// Without a namespace it walks through all, after the namespace and position of a sandbox.
// Each call of next returns at most that many further sandboxes.
func (m *Manager) eachMemberOf(n sandbox.Namespace, after string) (next func(most int) []*member) {
	spaces := []sandbox.Namespace{n}
	if n == "" {
		spaces = m.namespaces()
		slices.SortFunc(spaces, compareSpaces)
		if of, position, found := strings.Cut(after, "/"); found {
			spaces = slices.DeleteFunc(spaces, func(s sandbox.Namespace) bool { return compareSpaces(s, sandbox.Namespace(of)) < 0 })
			if after = ""; len(spaces) > 0 && string(spaces[0]) == of {
				after = position
			}
		}
	}
	return func(most int) (out []*member) {
		for len(spaces) > 0 && len(out) == 0 {
			m.eachMember(spaces[0], after, func(b *member) bool {
				out, after = append(out, b), b.position
				return len(out) < most
			})
			if len(out) < most {
				spaces, after = spaces[1:], ""
			}
		}
		return out
	}
}

// compareSpaces orders namespaces like the keys of their objects.
func compareSpaces(a, b sandbox.Namespace) int {
	return strings.Compare(string(a)+"/", string(b)+"/")
}

// namespaces returns the namespaces with sandboxes, unordered.
func (m *Manager) namespaces() (out []sandbox.Namespace) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for n := range m.roster.spaces {
		out = append(out, n)
	}
	return out
}

// members returns all sandboxes, unordered.
func (m *Manager) members() (out []*member) {
	for _, n := range m.namespaces() {
		m.eachMember(n, "", func(b *member) bool {
			out = append(out, b)
			return true
		})
	}
	return out
}
