package process

import (
	"context"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/vmm/vmmctl"
)

// TestStopListening: a process that listens is told to stop. If no process listens,
// that is no error.
func TestStopListening(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "control")
	if err := StopListening(t.Context(), path); err != nil {
		t.Errorf("no socket: %v", err)
	}
	listener, err := vmmctl.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan vmmctl.Message, 1)
	go func() {
		conn, err := vmmctl.Accept(listener)
		if err != nil {
			return
		}
		m, _, err := conn.Receive()
		if err == nil {
			told <- m
		}
		_ = conn.Close()
	}()
	if err := StopListening(t.Context(), path); err != nil {
		t.Error(err)
	}
	if m, ok := (<-told).(*vmmctl.Simple); !ok || m.Kind != vmmctl.KindStop {
		t.Errorf("it was told %#v", m)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	if err := StopListening(t.Context(), path); err != nil {
		t.Errorf("nobody listens: %v", err)
	}
	// The wait for a process that does not stop ends with ctx.
	silent, err := vmmctl.Listen(filepath.Join(dir, "silent"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := StopListening(ctx, filepath.Join(dir, "silent")); err == nil {
		t.Error("one that says nothing was taken for stopped")
	}
}
