package helper

import (
	"io"
	"sync"
)

// consoleSize is how many bytes of an agent's output are kept.
const consoleSize = 64 << 10

// console keeps the tail of the bytes that are written to it.
type console struct {
	mu   sync.Mutex // protects tail
	tail []byte
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tail = append(c.tail, p...)
	if over := len(c.tail) - consoleSize; over > 0 {
		c.tail = append([]byte(nil), c.tail[over:]...)
	}
	return len(p), nil
}

// bytes is a copy of the tail.
func (c *console) bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]byte(nil), c.tail...)
}

var _ io.Writer = (*console)(nil)
