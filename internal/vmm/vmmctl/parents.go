package vmmctl

import (
	"sync"

	"golang.org/x/sys/unix"
)

// Parents are the parents that control one process, each over a connection. A
// parent may be killed just after it has sent a request, and its successor may
// request the opposite. The requests of the dead parent are then served first,
// although both connections are read at once. Otherwise the old parent could pause
// for good a guest that the new parent has resumed.
type Parents struct {
	mu  sync.Mutex // protects all
	all map[*Conn]chan struct{}
}

// Add registers a parent. Its requests may be served only after wait has returned.
// wait waits for all parents that were gone when Add was called, until Remove was
// called for each.
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

// Remove says that no request of a parent will be served any more.
func (p *Parents) Remove(c *Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.all[c])
	delete(p.all, c)
}

// Each calls do for every parent. do must not block.
func (p *Parents) Each(do func(*Conn)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.all {
		do(c)
	}
}

// gone reports whether the other end is closed. Messages may still be unread.
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
