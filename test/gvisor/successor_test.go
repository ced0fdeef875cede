package gvisor

import (
	"context"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/vmm/vmmctl"
)

// TestSuccessor: the request of a parent that was killed at once is done before its
// successor's requests. So a sandbox that the successor has resumed is not paused
// afterwards.
func TestSuccessor(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	snap := freeze(t, boot(t, e))
	dir := folder.Folder(t.TempDir())
	sb, err := e.Fork(t.Context(), snap, engine.ForkOptions{Folder: string(dir)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	parent := func(op gvisorctl.Op) gvisorctl.Conn {
		t.Helper()
		c, err := vmmctl.Dial(dir.Control())
		if err != nil {
			t.Fatal(err)
		}
		conn := gvisorctl.Conn{Conn: c}
		if err := conn.Send(&gvisorctl.Message{ID: 1, Op: op}); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	for i := range 50 {
		if err := parent(gvisorctl.OpPause).Close(); err != nil {
			t.Fatal(err)
		}
		next := parent(gvisorctl.OpResume)
		if m, _, err := next.Receive(); err != nil || !m.Reply || m.Error != "" {
			t.Fatalf("time %d: %+v, %v", i, m, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if err := sb.Agent().Ping(ctx); err != nil {
			t.Fatalf("time %d: %v", i, err)
		}
		cancel()
		if err := next.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
