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
	// maxTries is how often a question is tried again that somebody else had begun, who was
	// at a bound of his own.
	maxTries = 8
)

// Upstreams are the servers that names are asked for.
type Upstreams struct {
	// Default answers for every name that is not below a domain of Internal.
	Default []netip.AddrPort
	// Internal has domains with upstreams of their own. They alone are asked for names below
	// it, and nobody else's word about these names counts.
	Internal map[string][]netip.AddrPort
}

// Config is what a Resolver is made with.
type Config struct {
	Upstreams Upstreams
	// Dial opens connections to upstreams; nil is the host's network.
	Dial DialFunc
	// CacheSize bounds the answers that are kept; 0 is 4096.
	CacheSize int
	// Flights bounds the questions that upstreams are asked at one time; 0 is DefaultFlights.
	Flights int
	// MixCase makes forged answers harder with servers that keep the case of names. Some
	// forwarders do not, and their answers are then lost.
	MixCase bool
}

// Resolver asks upstreams, and keeps what they said, for all sandboxes of a process.
type Resolver struct {
	exchanger exchanger
	cache     *cache
	zones     atomic.Pointer[[]*zone]
	group     singleflight.Group
	flights   flights

	// closed ends flights; they outlive the lookups that began them.
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

// Close ends all questions that are under way.
func (r *Resolver) Close() { r.close() }

// SetUpstreams replaces the upstreams, and forgets what the old ones said.
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

// zoneOf returns the zone of a name, among the given ones.
func zoneOf(zones []*zone, name string) *zone {
	for _, z := range zones {
		if z.domain == "" || below(name, z.domain) {
			return z
		}
	}
	return nil // the last zone has every name
}

// Lookup returns the addresses of a canonical name. It follows aliases that an upstream did
// not follow. A name without addresses, or that does not exist, is no error.
func (r *Resolver) Lookup(ctx context.Context, name string, family Family) (Answer, error) {
	return r.lookup(ctx, nil, name, family)
}

// lookup is Lookup on behalf of a client. The error is ErrLimit if that has too many questions
// under way, which may outlive the lookups that began them.
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
		// Whoever owns a public name must not learn, or reach, what is behind an internal one.
		if next.internal() && !z.internal() {
			return Answer{}, fmt.Errorf("resolve %s: alias %s: %w", name, current, ErrAlias)
		}
		z = next
	}
	return Answer{}, fmt.Errorf("resolve %s: %w", name, ErrAlias)
}

// ask returns one upstream's word about one question, from the cache if it is there. Equal
// questions to the same upstreams are asked once, for the client that was first.
func (r *Resolver) ask(ctx context.Context, client *Client, zones []*zone, q question) (reply, error) {
	if rep, ok := r.cache.get(q, time.Now()); ok {
		return rep, rep.err(q)
	}
	// Answers of upstreams that were replaced meanwhile are not for those who ask the new ones.
	// The flight has the zones, so that no others get their address while it lasts.
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
				continue // another client's bound is not this one's
			}
			if got.Err != nil {
				return reply{}, got.Err
			}
			rep := got.Val.(reply)
			return rep, rep.err(q)
		}
	}
}

// fly asks the upstreams, and keeps what they said unless they were replaced meanwhile.
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

// err is what a remembered failure is reported as.
func (r reply) err(q question) error {
	if r.failed {
		return fmt.Errorf("resolve %s: %w", q.name, ErrFailed)
	}
	return nil
}
