package dns

import (
	"context"
	"slices"
	"sync"
)

// DefaultFlights is how many questions to upstreams may be under way at once. Each
// takes a socket and some 20 KiB.
const DefaultFlights = 1024

// flights bounds the questions under way. A name whose servers never answer occupies
// a flight for lookupTimeout, so all flights may be taken. Then a client with few
// flights takes one from the client with the most. So each client gets a flight, as
// long as there are no more clients than flights.
type flights struct {
	most int

	mu  sync.Mutex
	all int                   // mu protects it and all following fields
	own map[*Client][]*flight // the oldest first; clients without flights are left out
}

// flight is one question under way.
type flight struct {
	client *Client
	cancel context.CancelCauseFunc
}

// begin takes a flight for a client. It returns nil if the client has its full share.
// If another client takes the flight away, cancel is called with ErrLimit and ends
// it. It is called with a mutex held.
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

// takeFor ends the oldest flight of the client with the most flights, unless c would
// then have more. The oldest flight is the least likely to be answered. The caller
// holds f.mu.
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

// end returns a flight, unless it was taken away.
func (f *flights) end(n *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(n)
}

// remove removes a flight, which may have been removed already. The caller holds
// f.mu.
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
