package vmmctl

import (
	"sync"

	"golang.org/x/sys/unix"
)

// Parents are those who control one process, each by a connection. One may be
// killed when it has just asked for something, and its successor ask for the
// opposite: what the dead one sent is then done first, although both are read from
// at once. Otherwise a guest that the new parent has resumed could be paused for
// good by the old one.
type Parents struct {
	mu  sync.Mutex // protects all
	all map[*Conn]chan struct{}
}

// Add takes on a parent. Before anything of it is served, wait must have returned:
// then all those that were gone when it came have been served to their end, which
// Remove says of them.
func (p *Parents) Add(c *Conn) (wait func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var before []chan struct{}
	for o, served := range p.all {
		if o.gone() {
			before = append(before, served)
		}
	}
	if p.all == nil {
		p.all = map[*Conn]chan struct{}{}
	}
	p.all[c] = make(chan struct{})
	return func() {
		for _, served := range before {
			<-served
		}
	}
}

// Remove says that nothing of a parent will be served any more.
func (p *Parents) Remove(c *Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.all[c])
	delete(p.all, c)
}

// Each calls do for every parent; it must not wait.
func (p *Parents) Each(do func(*Conn)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.all {
		do(c)
	}
}

// gone reports whether the other end is closed. There may still be messages.
func (c *Conn) gone() bool {
	gone := true // if this end is closed
	_ = c.raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		for {
			n, err := unix.Poll(poll, 0)
			if err == unix.EINTR {
				continue
			}
			gone = err != nil || n > 0
			return
		}
	})
	return gone
}
