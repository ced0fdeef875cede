package egress

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/policy"
)

// maxNamesOfAddress bounds the names of one address, because a server of many sites
// has many names.
const maxNamesOfAddress = 32

// Pin records that a sandbox got an address for a name. Forks and woken sandboxes
// inherit it.
type Pin struct {
	Addr netip.Addr
	Name string
	// Internal is set if an upstream of an internal domain has given the address.
	Internal bool
}

// pins are the pins of one sandbox. The caller holds the sandbox's mutex.
type pins struct {
	limit  int
	count  int
	byAddr map[netip.Addr][]pin // made with the first pin, since most sandboxes are idle
}

type pin struct {
	name     policy.Name
	internal bool
	// expires is when the name has to be resolved again before the address is
	// dialled.
	expires time.Time
}

// add pins addresses to a name. It replaces pins with the same address and name.
func (p *pins) add(name policy.Name, addrs []netip.Addr, internal bool, expires time.Time) {
	if p.byAddr == nil {
		p.byAddr = make(map[netip.Addr][]pin)
	}
	for _, addr := range addrs {
		addr = addresses.Normalize(addr)
		list := p.byAddr[addr]
		if at := slices.IndexFunc(list, func(other pin) bool { return other.name == name }); at >= 0 {
			list[at].internal, list[at].expires = internal, expires
			continue
		}
		if len(list) >= maxNamesOfAddress {
			p.drop(addr, oldest(list))
		} else if p.count >= p.limit {
			p.dropOldest()
		}
		p.byAddr[addr] = append(p.byAddr[addr], pin{name: name, internal: internal, expires: expires})
		p.count++
	}
}

// inherit adds another sandbox's pins as expired ones.
func (p *pins) inherit(list []Pin) {
	for _, pin := range list {
		name, err := policy.ParseName(pin.Name)
		if err == nil && pin.Addr.IsValid() {
			p.add(name, []netip.Addr{pin.Addr}, pin.Internal, time.Time{})
		}
	}
}

// of returns a copy of the pins of an address.
func (p *pins) of(addr netip.Addr) []pin { return slices.Clone(p.byAddr[addr]) }

// all returns the pins in a stable order.
func (p *pins) all() []Pin {
	list := make([]Pin, 0, p.count)
	for addr, pins := range p.byAddr {
		for _, pin := range pins {
			list = append(list, Pin{Addr: addr, Name: string(pin.name), Internal: pin.internal})
		}
	}
	slices.SortFunc(list, func(a, b Pin) int { return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Name, b.Name)) })
	return list
}

// dropOldest makes room. It drops the pin with the earliest expiry, which is the
// least likely to be used.
func (p *pins) dropOldest() {
	var at netip.Addr
	var found *pin
	for addr, list := range p.byAddr {
		if candidate := &list[oldest(list)]; found == nil || candidate.expires.Before(found.expires) {
			at, found = addr, candidate
		}
	}
	if found != nil {
		p.drop(at, oldest(p.byAddr[at]))
	}
}

func (p *pins) drop(addr netip.Addr, index int) {
	list := slices.Delete(p.byAddr[addr], index, index+1)
	p.count--
	if len(list) == 0 {
		delete(p.byAddr, addr)
	} else {
		p.byAddr[addr] = list
	}
}

func oldest(list []pin) int {
	at := 0
	for i := range list {
		if list[i].expires.Before(list[at].expires) {
			at = i
		}
	}
	return at
}
