package helper

import (
	"testing"

	"agentrun.dev/internal/engine/gvisorctl"
)

// TestProtocol: this helper speaks the newest version.
func TestProtocol(t *testing.T) {
	if protocol != gvisorctl.Protocol {
		t.Errorf("it speaks version %d, and there is %d: move what was added last to newest.go", protocol, gvisorctl.Protocol)
	}
}
