package egress

import (
	"net/netip"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/network/policy"
)

// Outcome is the way in which a connection, or an attempt, ended.
type Outcome string

// The outcomes.
const (
	// Open: the connection is still open. It is not in the log yet.
	Open Outcome = "open"
	// Closed: both sides ended the connection.
	Closed Outcome = "closed"
	// ResetByRemote and ResetBySandbox: one side broke the connection off.
	ResetByRemote  Outcome = "reset by remote"
	ResetBySandbox Outcome = "reset by sandbox"
	// Refused: the policy did not allow the connection. Nothing was sent to the other
	// side.
	Refused Outcome = "refused"
	// Failed: the policy allowed the connection, but the outside did not answer.
	Failed Outcome = "failed"
	// Cut: a change of the policy, or the end of the sandbox, has ended the
	// connection.
	Cut Outcome = "cut"
)

// Entry is one line of a sandbox's log: a connection that has ended, or a refusal.
type Entry struct {
	// Seq counts up from 1 without gaps.
	Seq uint64
	// Time is when the sandbox asked for the connection. Ended is when the entry was
	// written.
	Time, Ended time.Time
	// Protocol is tcp, udp or dns.
	Protocol string
	// Name is the name that the connection was for, if it is known.
	Name string
	// Address is the address that the sandbox asked for. Remote is the address that
	// was dialled instead, if the name has moved since the sandbox resolved it.
	Address, Remote netip.AddrPort
	// Sent and Received count bytes from the sandbox's point of view.
	Sent, Received uint64
	// Rule has decided, and Kind is its kind. Reason says why, for people.
	Rule    string
	Kind    policy.Kind
	Reason  string
	Outcome Outcome
	// Repeated is how many further attempts were refused for the same reason since
	// Time.
	Repeated uint64
}

// similar reports whether another entry is the same refusal.
func (e *Entry) similar(other Entry) bool {
	return e.Outcome == Refused && other.Outcome == Refused && e.Protocol == other.Protocol &&
		e.Name == other.Name && e.Address == other.Address && e.Rule == other.Rule && e.Reason == other.Reason
}

// maxReason bounds the reason of an entry, because a log keeps many entries. A
// sandbox can have an address for 32 long names, and the reason of a refusal contains
// all of them.
const maxReason = 512

// ring keeps the last entries.
type ring struct {
	size int

	mu      sync.Mutex
	entries []Entry       // mu protects it and all following fields; the entry with sequence number n is at (n-1) % size
	last    uint64        // sequence number of the newest entry
	changed chan struct{} // closed at the next entry; nil if no reader waits
}

// add appends an entry. A refusal that repeats the newest entry is counted there, so
// that a loop of attempts does not displace all other entries.
func (r *ring) add(e Entry) {
	e.Reason = strings.Clone(e.Reason[:min(len(e.Reason), maxReason)])
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
	if r.last > 0 {
		if newest := &r.entries[(r.last-1)%uint64(r.size)]; newest.similar(e) {
			newest.Repeated++
			newest.Ended = e.Ended
			return
		}
	}
	r.last++
	e.Seq = r.last
	if len(r.entries) < r.size {
		r.entries = append(r.entries, e)
	} else {
		r.entries[(r.last-1)%uint64(r.size)] = e
	}
}

// since returns up to limit entries after a sequence number, oldest first. A number
// that is too high comes from an earlier log; then since returns the first entries.
func (r *ring) since(seq uint64, limit int) []Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	if seq > r.last {
		seq = 0
	}
	first := max(seq, r.last-uint64(len(r.entries))) + 1
	var list []Entry
	for n := first; n <= r.last && len(list) < limit; n++ {
		list = append(list, r.entries[(n-1)%uint64(r.size)])
	}
	return list
}

// next returns a channel that is closed at the next entry or repetition.
func (r *ring) next() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	return r.changed
}
