package dns

import (
	"context"
	"slices"
	"sync"
)

// DefaultFlights is how many questions upstreams are asked at one time. Each has a socket and
// some 20 KiB.
const DefaultFlights = 1024

// flights bounds the questions under way. Names whose servers never answer keep theirs for
// lookupTimeout, so there is not always a free one: then a client with few takes one from the
// client with the most. So each finds one, as long as there are no more clients than flights.
type flights struct {
	most int

	mu  sync.Mutex
	all int                   // mu protects it and all following fields
	own map[*Client][]*flight // the oldest first; without clients that have none
}

// flight is one question under way.
type flight struct {
	client *Client
	cancel context.CancelCauseFunc
}

// begin takes a flight for a client, and returns nil if it has its share. cancel ends the
// flight with ErrLimit when it is taken away; it is called with a mutex held.
func (f *flights) begin(c *Client, cancel context.CancelCauseFunc) *flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c != nil && len(f.own[c]) >= c.meter.limits.Pending {
		return nil
	}
	if f.all >= f.most && !f.takeFor(c) {
		return nil
	}
	if f.own == nil {
		f.own = make(map[*Client][]*flight)
	}
	n := &flight{c, cancel}
	f.own[c] = append(f.own[c], n)
	f.all++
	return n
}

// takeFor ends the oldest flight of the client with the most, unless c would then have more. It
// is the one that is least likely to be answered. The caller holds f.mu.
func (f *flights) takeFor(c *Client) bool {
	var most []*flight
	for _, list := range f.own {
		if len(list) > len(most) {
			most = list
		}
	}
	if len(f.own[c])+1 >= len(most) {
		return false
	}
	most[0].cancel(ErrLimit)
	f.remove(most[0])
	return true
}

// end gives a flight back, if it was not taken away.
func (f *flights) end(n *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(n)
}

// remove takes a flight out that may be out already. The caller holds f.mu.
func (f *flights) remove(n *flight) {
	at := slices.Index(f.own[n.client], n)
	if at < 0 {
		return
	}
	f.all--
	if f.own[n.client] = slices.Delete(f.own[n.client], at, at+1); len(f.own[n.client]) == 0 {
		delete(f.own, n.client)
	}
}
