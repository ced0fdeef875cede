package microvm

import (
	"testing"
	"time"

	"agentrun.dev/internal/host/goruntime/goruntimetest"
)

// TestOnlyTheMonitorIsSlow checks the threads of a vmm.
func TestOnlyTheMonitorIsSlow(t *testing.T) {
	p := startBare(t, openJail(t))
	goruntimetest.OnlyMonitorIsSlow(t, p.Pid(), 10*time.Millisecond)
}
