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

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// ticketLife is how long a token of a terminal can be redeemed: a page that has
// just got one opens its terminal at once.
const ticketLife = 30 * time.Second

// Bounds of the tokens that nobody has redeemed yet: of all principals, and of one,
// which leaves room for the others and takes little memory.
const (
	maxTickets        = 1024
	maxOwnTickets     = 128
	maxOwnTicketBytes = 2 * maxTerminalBody
)

// ticket is what a token of a terminal stands for.
type ticket struct {
	who     access.Principal
	key     sandbox.Key
	id      sandbox.ID // names can go to others
	req     guestrpc.ExecRequest
	expires time.Time
}

// size is about what a ticket takes that its principal has chosen.
func (t ticket) size() (n int64) {
	for _, text := range slices.Concat(t.req.Argv, t.req.Env, []string{t.req.Workdir, t.req.User}) {
		n += int64(len(text))
	}
	return n
}

// Terminals keeps the tokens of terminals until they are redeemed. The servers
// of one daemon share it: who gives a token away need not be reached the same
// way as who takes it.
type Terminals struct {
	now func() time.Time

	mu      sync.Mutex // protects tickets
	tickets map[[sha256.Size]byte]ticket
}

// NewTerminals makes a store without tokens.
func NewTerminals() *Terminals {
	return &Terminals{now: time.Now, tickets: map[[sha256.Size]byte]ticket{}}
}

// issue makes a token.
func (ts *Terminals) issue(t ticket) (token string, expires time.Time, err error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	now := ts.now()
	own, bytes := 1, t.size()
	for digest, old := range ts.tickets {
		switch {
		case !now.Before(old.expires):
			delete(ts.tickets, digest)
		case old.who.Name == t.who.Name:
			own++
			bytes += old.size()
		}
	}
	if own > maxOwnTickets || bytes > maxOwnTicketBytes {
		return "", time.Time{}, sandbox.Errorf(sandbox.CodeCapacity, "too many tokens of terminals of %s wait to be used", t.who.Name).
			Because("a principal has at most %d at a time, with commands and environments of %d bytes", maxOwnTickets, maxOwnTicketBytes).
			Try("Use them, or try again in %v", ticketLife)
	}
	if len(ts.tickets) >= maxTickets {
		return "", time.Time{}, sandbox.Errorf(sandbox.CodeCapacity, "%d tokens of terminals wait to be used", maxTickets).
			Try("Try again in %v", ticketLife)
	}
	token = rand.Text() + rand.Text()
	t.expires = now.Add(ticketLife)
	ts.tickets[sha256.Sum256([]byte(token))] = t
	return token, t.expires.UTC(), nil
}

// redeem uses a token up. It is looked for by its digest, which tells nothing
// about those that are close to it.
func (ts *Terminals) redeem(token string) (ticket, error) {
	digest := sha256.Sum256([]byte(token))
	ts.mu.Lock()
	defer ts.mu.Unlock()
	t, found := ts.tickets[digest]
	delete(ts.tickets, digest)
	// It is no better than the key, or the token of a sandbox, that it was asked for with.
	over := t.who.Until != nil && t.who.Until.Err() != nil
	if !found || over || !ts.now().Before(t.expires) {
		return ticket{}, errNoTicket()
	}
	return t, nil
}

func errNoTicket() error {
	return sandbox.Errorf(access.CodeUnauthenticated, "the token opens no terminal here").
		Because("it was used, has expired or is for another sandbox").Try("POST to the terminal for a new one")
}

// authenticateRoute says who makes a request to a route: who asked for the terminal
// that a token opens, or else whom authenticate finds.
func (a *api) authenticateRoute(r *http.Request, route string, to *portTarget) (access.Principal, context.Context, error) {
	ctx := r.Context()
	if to != nil || route != terminalRoute || r.URL.Query().Get("token") == "" {
		who, err := a.authenticate(to.credentials(r))
		return who, ctx, err
	}
	if err := checkQuery(route, r.URL.RawQuery); err != nil {
		return access.Principal{}, ctx, err
	}
	// A page of another site is not to use a token up.
	if err := checkOrigin(r, a.AllowOrigins); err != nil {
		return access.Principal{}, ctx, err
	}
	t, err := a.Terminals.redeem(r.URL.Query().Get("token"))
	return t.who, context.WithValue(ctx, ticketKey, t), err
}

// checkOrigin refuses requests of pages of other sites. Those that are not made
// by a browser have no origin, and need none.
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
