package microvm

import (
	"context"
	"testing"
)

// TestResumeWithoutAgent: an adopted paused sandbox is paused again if no session
// with its agent can be opened, because Resume has reported a failure to its caller.
func TestResumeWithoutAgent(t *testing.T) {
	p := startBare(t, openJail(t)) // a guest without an agent
	s := &sandbox{Guest: &Guest{Process: p}}
	if err := s.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Resume(gone); err == nil {
		t.Fatal("a guest without an agent was resumed")
	}
	wait, err := p.PostResume()
	if err != nil {
		t.Fatal(err)
	}
	if stood, err := wait(t.Context()); err != nil || !stood {
		t.Errorf("the guest stood still: %t, %v, though it was not resumed", stood, err)
	}
}
