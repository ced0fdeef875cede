package dns

import (
	"container/list"
	"net/netip"
	"sync"
	"time"
)

// question is a question to one upstream, and the key of the cache.
type question struct {
	name   string
	family Family
}

// reply is the answer of one upstream to one question: the part of its message that
// concerns the name asked for. Records of other names are left out, so they are
// neither kept nor passed on.
type reply struct {
	aliases  []string
	addrs    []netip.Addr
	notFound bool
	// open is set if the last alias has to be asked for in turn.
	open bool
	// failed is set if no upstream answered.
	failed  bool
	expires time.Time
}

// cache keeps replies until they expire. It keeps at most size replies, and drops the
// least recently used one first.
type cache struct {
	size int

	mu      sync.Mutex
	entries map[question]*list.Element // mu protects it and order
	order   *list.List                 // of cached, most recently used first
}

type cached struct {
	question question
	reply    reply
}

func newCache(size int) *cache {
	return &cache{size: size, entries: make(map[question]*list.Element), order: list.New()}
}

func (c *cache) get(q question, now time.Time) (reply, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	element, ok := c.entries[q]
	if !ok {
		return reply{}, false
	}
	entry := element.Value.(*cached)
	if !now.Before(entry.reply.expires) {
		c.remove(element)
		return reply{}, false
	}
	c.order.MoveToFront(element)
	return entry.reply, true
}

// put keeps a reply if it is current, which is asked while nobody clears the cache: whoever
// clears it makes what was asked before not current first.
func (c *cache) put(q question, r reply, current func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !current() {
		return
	}
	if element, ok := c.entries[q]; ok {
		element.Value.(*cached).reply = r
		c.order.MoveToFront(element)
		return
	}
	c.entries[q] = c.order.PushFront(&cached{question: q, reply: r})
	if c.order.Len() > c.size {
		c.remove(c.order.Back())
	}
}

// remove removes an entry. The caller holds c.mu.
func (c *cache) remove(element *list.Element) {
	c.order.Remove(element)
	delete(c.entries, element.Value.(*cached).question)
}

func (c *cache) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.entries)
	c.order.Init()
}
