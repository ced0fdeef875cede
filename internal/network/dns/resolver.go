package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
)

const (
	defaultCacheSize = 4096
	// maxTries is how often a question is asked again if the client that had begun it
	// reached its own limit.
	maxTries = 8
)

// Upstreams are the servers that the resolver asks.
type Upstreams struct {
	// Default serves every name that is not below a domain of Internal.
	Default []netip.AddrPort
	// Internal maps domains to upstreams of their own. Only these are asked for names
	// in the domain, and no other server is believed about them.
	Internal map[string][]netip.AddrPort
}

// Config configures a Resolver.
type Config struct {
	Upstreams Upstreams
	// Dial opens connections to upstreams; nil uses the host's network.
	Dial DialFunc
	// CacheSize bounds the number of kept answers; 0 is 4096.
	CacheSize int
	// Flights bounds the questions to upstreams under way at once; 0 is
	// DefaultFlights.
	Flights int
	// MixCase makes it harder to forge answers of servers that preserve the case of
	// names. Some forwarders do not preserve it, and their answers are then lost.
	MixCase bool
}

// Resolver asks upstreams, and keeps their answers, for all sandboxes of a process.
type Resolver struct {
	exchanger exchanger
	cache     *cache
	zones     atomic.Pointer[[]*zone]
	group     singleflight.Group
	flights   flights

	// closed ends flights. They outlive the lookups that began them.
	closed context.Context
	close  context.CancelFunc
}

// New returns a resolver. Close ends it.
func New(config Config) (*Resolver, error) {
	dial := config.Dial
	if dial == nil {
		dial = func(ctx context.Context, network string, upstream netip.AddrPort) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, upstream.String())
		}
	}
	size := config.CacheSize
	if size <= 0 {
		size = defaultCacheSize
	}
	most := config.Flights
	if most <= 0 {
		most = DefaultFlights
	}
	r := &Resolver{
		exchanger: exchanger{dial: dial, mixCase: config.MixCase},
		cache:     newCache(size),
		flights:   flights{most: most},
	}
	if err := r.SetUpstreams(config.Upstreams); err != nil {
		return nil, err
	}
	r.closed, r.close = context.WithCancel(context.Background())
	return r, nil
}

// Close ends all questions under way.
func (r *Resolver) Close() { r.close() }

// SetUpstreams replaces the upstreams, and drops the answers of the old ones.
func (r *Resolver) SetUpstreams(u Upstreams) error {
	zones := []*zone{{upstreams: slices.Clone(u.Default)}}
	for domain, upstreams := range u.Internal {
		name, err := CanonicalName(domain)
		if err != nil {
			return fmt.Errorf("internal domain %q: %w", domain, err)
		}
		if len(upstreams) == 0 {
			return fmt.Errorf("internal domain %q has no upstream: name at least one", domain)
		}
		zones = append(zones, &zone{domain: name, upstreams: slices.Clone(upstreams)})
	}
	// The longest domain comes first, so that the first match is the most precise.
	slices.SortFunc(zones, func(a, b *zone) int { return len(b.domain) - len(a.domain) })
	for i, z := range zones[:len(zones)-1] {
		if slices.ContainsFunc(zones[:i], func(other *zone) bool { return other.domain == z.domain }) {
			return fmt.Errorf("internal domain %q is named twice", z.domain)
		}
	}
	r.zones.Store(&zones)
	r.cache.clear()
	return nil
}

// Internal reports whether a canonical name is below a domain that is internal now.
func (r *Resolver) Internal(name string) bool { return zoneOf(*r.zones.Load(), name).internal() }

// zoneOf returns the zone of a name among zones.
func zoneOf(zones []*zone, name string) *zone {
	for _, z := range zones {
		if z.domain == "" || below(name, z.domain) {
			return z
		}
	}
	return nil // unreachable: the last zone contains every name
}

// Lookup returns the addresses of a canonical name. It follows the aliases that an
// upstream did not follow. A name that has no addresses, or does not exist, is no
// error.
func (r *Resolver) Lookup(ctx context.Context, name string, family Family) (Answer, error) {
	return r.lookup(ctx, nil, name, family)
}

// lookup is Lookup for a client. The error is ErrLimit if the client has too many
// questions under way. These may outlive the lookups that began them.
func (r *Resolver) lookup(ctx context.Context, client *Client, name string, family Family) (Answer, error) {
	zones := *r.zones.Load()
	answer := Answer{Internal: true}
	z := zoneOf(zones, name)
	current := name
	for range maxAliases + 1 {
		answer.Internal = answer.Internal && z.internal()
		rep, err := r.ask(ctx, client, zones, question{name: current, family: family})
		if err != nil {
			return Answer{}, err
		}
		if answer.Expires.IsZero() || rep.expires.Before(answer.Expires) {
			answer.Expires = rep.expires
		}
		for _, target := range rep.aliases {
			if target == name || slices.Contains(answer.Aliases, target) || len(answer.Aliases) == maxAliases {
				return Answer{}, fmt.Errorf("resolve %s: %w", name, ErrAlias)
			}
			answer.Aliases = append(answer.Aliases, target)
		}
		if !rep.open {
			answer.Addrs, answer.NotFound = rep.addrs, rep.notFound
			return answer, nil
		}
		current = rep.aliases[len(rep.aliases)-1]
		next := zoneOf(zones, current)
		// The owner of a public name must neither learn nor reach the addresses
		// behind an internal name.
		if next.internal() && !z.internal() {
			return Answer{}, fmt.Errorf("resolve %s: alias %s: %w", name, current, ErrAlias)
		}
		z = next
	}
	return Answer{}, fmt.Errorf("resolve %s: %w", name, ErrAlias)
}

// ask returns one upstream's answer to one question, from the cache if it is there.
// Equal questions to the same upstreams are asked once, for the first client.
func (r *Resolver) ask(ctx context.Context, client *Client, zones []*zone, q question) (reply, error) {
	if rep, ok := r.cache.get(q, time.Now()); ok {
		return rep, rep.err(q)
	}
	// Answers of replaced upstreams must not reach clients of the new ones. So the
	// key contains the address of the zones. The flight keeps the zones alive, so
	// that the address is not reused meanwhile.
	key := fmt.Sprintf("%s %v %p", q.name, q.family.recordType(), zones[0])
	for try := 1; ; try++ {
		var first atomic.Bool
		result := r.group.DoChan(key, func() (any, error) {
			first.Store(true)
			return r.fly(client, zones, q)
		})
		select {
		case <-ctx.Done():
			return reply{}, fmt.Errorf("resolve %s: %w", q.name, ctx.Err())
		case got := <-result:
			if errors.Is(got.Err, ErrLimit) && !first.Load() && try < maxTries {
				continue // another client's limit does not apply to this one
			}
			if got.Err != nil {
				return reply{}, got.Err
			}
			rep := got.Val.(reply)
			return rep, rep.err(q)
		}
	}
}

// fly asks the upstreams, and keeps their answer unless the upstreams were replaced
// meanwhile.
func (r *Resolver) fly(client *Client, zones []*zone, q question) (reply, error) {
	ctx, takeAway := context.WithCancelCause(r.closed)
	defer takeAway(nil)
	flight := r.flights.begin(client, takeAway)
	if flight == nil {
		return reply{}, fmt.Errorf("resolve %s: too many questions are under way: %w", q.name, ErrLimit)
	}
	defer r.flights.end(flight)
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	z := zoneOf(zones, q.name)
	m, err := r.exchanger.ask(ctx, z, q)
	now := time.Now()
	var rep reply
	if err == nil {
		rep, err = m.reply(q.name, func(name string) bool { return zoneOf(zones, name) == z }, now)
	}
	if err != nil && errors.Is(context.Cause(ctx), ErrLimit) {
		return reply{}, fmt.Errorf("resolve %s: too many questions are under way: %w", q.name, ErrLimit)
	}
	if err != nil && !errors.Is(err, ErrAlias) {
		if r.closed.Err() != nil {
			return reply{}, err
		}
		rep = reply{failed: true, expires: now.Add(failureTTL)}
	} else if err != nil {
		return reply{}, err
	}
	r.cache.put(q, rep, func() bool { current := *r.zones.Load(); return &current[0] == &zones[0] })
	return rep, nil
}

// err is the error for a kept failure.
func (r reply) err(q question) error {
	if r.failed {
		return fmt.Errorf("resolve %s: %w", q.name, ErrFailed)
	}
	return nil
}
