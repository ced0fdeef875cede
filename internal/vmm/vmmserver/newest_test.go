package vmmserver

import (
	"testing"

	"agentrun.dev/internal/vmm/vmmctl"
)

// TestProtocol: this vmm speaks the newest version.
func TestProtocol(t *testing.T) {
	if protocol != vmmctl.Protocol {
		t.Errorf("it speaks version %d, and there is %d: move what was added last to newest.go", protocol, vmmctl.Protocol)
	}
}
