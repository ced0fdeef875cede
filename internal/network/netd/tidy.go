package netd

import (
	"runtime"
	"runtime/debug"
	"time"
)

const (
	// tidyAfter is how long no wire has come or gone when memory is given back.
	tidyAfter = 2 * time.Second
	// tidyBelow is the heap from which on the garbage collector does its work alone: it
	// is busy then, and what wires have left is little of it.
	tidyBelow = 32 << 20
	// usualPercent is Go's GOGC. eagerPercent is that while wires come and go: requests
	// leave more than a wire needs, and what lies between the wires then stays when the
	// rest of it is gone. Under load it would be too much work.
	usualPercent = 100
	eagerPercent = 10
)

// tidySoon gives memory back some time after the last wire has come or gone. In a heap
// this small nothing else would collect what is left of requests for hours.
func (s *Server) tidySoon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	if !s.untidy {
		s.untidy = true
		debug.SetGCPercent(eagerPercent)
	}
	s.tidying.Reset(tidyAfter)
}

func (s *Server) tidy() {
	s.mu.Lock()
	s.untidy = false
	debug.SetGCPercent(usualPercent)
	s.mu.Unlock()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if m.HeapAlloc < tidyBelow {
		debug.FreeOSMemory()
	}
}
