package rest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// ticketLife is how long a token of a terminal can be redeemed: a page that has
// just got one opens its terminal at once.
const ticketLife = 30 * time.Second

// Bounds of the tokens that are not redeemed yet: of all, of those for sandboxes of one
// namespace, and of those of one principal. Each sandbox's token is a principal of its
// own, so only the bound of the namespace limits a tenant with many sandboxes.
const (
	maxTickets          = 1024
	maxNamespaceTickets = 256
	maxOwnTickets       = 128

	// ticketCost is the least cost of a ticket, in bytes. The bounds hold for the sums of
	// costs: one ticket with a large environment costs as much as several.
	ticketCost = 16 << 10
)

// ticket is the terminal that a token opens.
type ticket struct {
	digest  [sha256.Size]byte // of the token
	who     access.Principal
	key     sandbox.Key
	id      sandbox.ID // other sandboxes can get the name
	req     guestrpc.ExecRequest
	expires time.Time
	cost    int64 // see ticketCost
}

// costOf estimates how many bytes a ticket with a command takes in memory.
func costOf(req guestrpc.ExecRequest) (n int64) {
	const header = int64(unsafe.Sizeof(""))
	for _, text := range slices.Concat(req.Argv, req.Env, []string{req.Workdir, req.User}) {
		n += header + int64(len(text))
	}
	return max(n, ticketCost)
}

func (t ticket) principal() string { return t.who.Name }
func (t ticket) namespace() string { return string(t.key.Namespace) }

// Terminals keeps the tokens of terminals until they are redeemed. The servers
// of one daemon share it, so a token need not be redeemed over the server that
// made it.
type Terminals struct {
	now func() time.Time

	mu      sync.Mutex // protects tickets
	tickets []ticket   // in the order in which they were issued
}

// NewTerminals makes a store without tokens.
func NewTerminals() *Terminals { return &Terminals{now: time.Now} }

// issue makes a token.
func (ts *Terminals) issue(t ticket) (token string, expires time.Time, err error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	now := ts.now()
	ts.tickets = slices.DeleteFunc(ts.tickets, func(old ticket) bool { return !now.Before(old.expires) })
	t.cost = costOf(t.req)
	kept, err := makeRoom(ts.tickets, t)
	if err != nil {
		return "", time.Time{}, err
	}
	ts.tickets = kept
	token = rand.Text() + rand.Text()
	t.digest, t.expires = sha256.Sum256([]byte(token)), now.Add(ticketLife)
	ts.tickets = append(ts.tickets, t)
	return token, t.expires.UTC(), nil
}

// makeRoom returns the tickets that stay beside a new one, or refuses the new one. A new
// ticket displaces the oldest ones of the principal with the greatest cost in its namespace,
// and then those of the namespace with the greatest cost. It does so only while these cost
// more than its own principal or namespace would: a holder of many tokens takes none from
// holders of few.
func makeRoom(all []ticket, t ticket) ([]ticket, error) {
	own := t.cost
	for _, old := range all {
		if old.principal() == t.principal() {
			own += old.cost
		}
	}
	if own > maxOwnTickets*ticketCost {
		return nil, tooManyTickets(t.who.Name, "a principal", maxOwnTickets)
	}
	sameNamespace := func(old ticket) bool { return old.namespace() == t.namespace() }
	all, ok := displace(all, t, sameNamespace, ticket.principal, maxNamespaceTickets)
	if !ok {
		return nil, tooManyTickets("namespace "+t.namespace(), "a namespace", maxNamespaceTickets)
	}
	everywhere := func(ticket) bool { return true }
	if all, ok = displace(all, t, everywhere, ticket.namespace, maxTickets); !ok {
		return nil, tooManyTickets("the node", "a node", maxTickets)
	}
	return all, nil
}

// displace drops tickets, of those that are within a bound, until there is room for t. It fails
// if no group costs more than that of t would. It does not change the array of all.
func displace(all []ticket, t ticket, within func(ticket) bool, group func(ticket) string, most int64) (_ []ticket, ok bool) {
	for copied := false; ; {
		costs, total := map[string]int64{}, t.cost
		greedy := group(t)
		for _, old := range all {
			if !within(old) {
				continue
			}
			g := group(old)
			costs[g] += old.cost
			total += old.cost
			if costs[g] > costs[greedy] {
				greedy = g
			}
		}
		if total <= most*ticketCost {
			return all, true
		}
		if costs[group(t)]+t.cost >= costs[greedy] {
			return nil, false
		}
		if !copied {
			all, copied = slices.Clone(all), true
		}
		oldest := slices.IndexFunc(all, func(old ticket) bool { return within(old) && group(old) == greedy })
		all = slices.Delete(all, oldest, oldest+1)
	}
}

func tooManyTickets(of, one string, most int) error {
	return sandbox.Errorf(sandbox.CodeCapacity, "too many tokens of terminals of %s wait to be used", of).
		Because("%s has at most %d at a time, with commands and environments of %d bytes", one, most, most*ticketCost).
		Try("Use them, or try again in %v", ticketLife)
}

// redeem uses a token up. It finds the token by its digest, so the search
// reveals nothing about similar tokens.
func (ts *Terminals) redeem(token string) (ticket, error) {
	digest := sha256.Sum256([]byte(token))
	ts.mu.Lock()
	defer ts.mu.Unlock()
	i := slices.IndexFunc(ts.tickets, func(t ticket) bool { return t.digest == digest })
	if i < 0 {
		return ticket{}, errNoTicket()
	}
	t := ts.tickets[i]
	ts.tickets = slices.Delete(ts.tickets, i, i+1)
	// The ticket is no better than the key, or the token of a sandbox, that it was
	// requested with.
	over := t.who.Until != nil && t.who.Until.Err() != nil
	if over || !ts.now().Before(t.expires) {
		return ticket{}, errNoTicket()
	}
	return t, nil
}

func errNoTicket() error {
	return sandbox.Errorf(access.CodeUnauthenticated, "the token opens no terminal here").
		Because("it was used, has expired, has given way to those of others or is for another sandbox").Try("POST to the terminal for a new one")
}

// authenticateRoute finds the principal of a request to a route. For the token of a
// terminal it is the principal that asked for the terminal, otherwise the one that
// authenticate finds.
func (a *api) authenticateRoute(r *http.Request, route string, to *portTarget) (access.Principal, context.Context, error) {
	ctx := r.Context()
	if to != nil || route != terminalRoute || r.URL.Query().Get("token") == "" {
		who, err := a.authenticate(to.credentials(r))
		return who, ctx, err
	}
	if err := checkQuery(route, r.URL.RawQuery); err != nil {
		return access.Principal{}, ctx, err
	}
	// A page of another site must not use a token up.
	if err := checkOrigin(r, a.AllowOrigins); err != nil {
		return access.Principal{}, ctx, err
	}
	t, err := a.Terminals.redeem(r.URL.Query().Get("token"))
	return t.who, context.WithValue(ctx, ticketKey, t), err
}

// checkOrigin refuses requests of pages of other sites. Requests that are not
// made by a browser have no origin, and need none.
func checkOrigin(r *http.Request, allowed []string) error {
	given := r.Header["Origin"]
	if len(given) == 0 {
		return nil
	}
	u, err := url.Parse(given[0])
	switch {
	case len(given) > 1 || err != nil:
	case u.Host != "" && strings.EqualFold(u.Host, r.Host):
		return nil
	case slices.Contains(allowed, strings.ToLower(given[0])):
		return nil
	}
	return sandbox.Errorf(sandbox.CodeDenied, "a page of %q may not open a terminal here", server.Trimmed(strings.Join(given, ", "))).
		Try("Allow its origin with `agentrun up --allow-origin`")
}

// ParseOrigin checks an origin that is to be allowed, such as
// https://console.example.com.
func ParseOrigin(s string) (string, error) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Scheme+"://"+u.Host != s {
		return "", sandbox.Invalid("origin", "%q is not a scheme and a host, such as https://console.example.com", server.Trimmed(s))
	}
	return strings.ToLower(s), nil
}
