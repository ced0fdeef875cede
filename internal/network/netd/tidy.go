package netd

import (
	"runtime"
	"runtime/debug"
	"time"
)

const (
	// tidyAfter is how long no wire must come or go before memory is returned to the
	// host.
	tidyAfter = 2 * time.Second
	// tidyBelow is the heap size from which on the garbage collector is left alone.
	// It is then busy by itself, and the remains of wires are a small part.
	tidyBelow = 32 << 20
	// usualPercent is Go's default GOGC. eagerPercent is GOGC while wires come and
	// go. Requests leave more garbage than a wire needs memory. If the garbage were
	// collected late, the wires would be spread over more pages, which stay in use
	// after it is gone. Under load, eagerPercent would cost too much.
	usualPercent = 100
	eagerPercent = 10
)

// tidySoon returns memory to the host some time after the last wire has come or gone.
// In a heap this small, the remains of requests would otherwise not be collected for
// hours.
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
