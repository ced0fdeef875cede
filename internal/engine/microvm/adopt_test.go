package microvm

import (
	"context"
	"testing"
)

// TestResumeWithoutAgent: a paused sandbox that was adopted, and with whose agent no
// session can be had, stands still again: whoever was told that it was not resumed
// goes by that.
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
