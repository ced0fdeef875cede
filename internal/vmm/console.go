package vmm

import "sync"

// consoleLimit bounds the kept output of a guest's console. It has room for a
// kernel panic with its stack, no matter how much the guest printed before.
const consoleLimit = 64 << 10

// consoleLog keeps the last consoleLimit bytes of the guest's output. It grows
// on demand, so a quiet guest needs no memory for it.
type consoleLog struct {
	mu    sync.Mutex // protects all following fields
	buf   []byte
	next  int // index of the oldest byte once buf is full
	total uint64
}

func (c *consoleLog) append(b byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total++
	if len(c.buf) < consoleLimit {
		c.buf = append(c.buf, b)
		return
	}
	c.buf[c.next] = b
	c.next = (c.next + 1) % consoleLimit
}

// Console is the end of a guest's output.
type Console struct {
	// Tail holds the last bytes, oldest first.
	Tail []byte
	// Total counts all bytes ever printed.
	Total uint64
}

func (c *consoleLog) snapshot() Console {
	c.mu.Lock()
	defer c.mu.Unlock()
	tail := make([]byte, 0, len(c.buf))
	tail = append(tail, c.buf[c.next:]...)
	tail = append(tail, c.buf[:c.next]...)
	return Console{Tail: tail, Total: c.total}
}
