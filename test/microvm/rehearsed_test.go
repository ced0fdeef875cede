package microvm

import (
	"context"
	"errors"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
)

// TestRehearsed: the pages that the rehearsals of two forks have written are
// present in the next fork before its first request, with the content of the
// snapshot. A failed rehearsal ends its fork.
func TestRehearsed(t *testing.T) {
	ctx := t.Context()
	e := newEngine(t)
	snap := bootSnapshot(t, e, 1, "dd if=/dev/zero of=/dev/shm/work bs=4096 count=400 && echo whole > /warm")
	own := func(sb engine.Sandbox) uint64 {
		t.Helper()
		st, err := sb.Stats(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return st.Own
	}
	// The work is in place, so that each fork writes to the same pages.
	rehearse := func(_ context.Context, sb engine.Sandbox) error {
		inShell(t, sb, "yes | dd of=/dev/shm/work bs=4096 count=400 iflag=fullblock conv=notrunc")
		return nil
	}
	plain, err := e.Fork(ctx, snap, engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plain.Close() })
	without := own(plain)
	for range 2 {
		sb, err := engine.ForkRehearsed(ctx, e, snap, engine.ForkOptions{}, rehearse)
		if err != nil {
			t.Fatal(err)
		}
		if err := sb.Close(); err != nil {
			t.Fatal(err)
		}
	}
	next, err := e.Fork(ctx, snap, engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = next.Close() })
	if with := own(next); with < without+300*4096 || with > without+1024*4096 {
		t.Errorf("a fork has %d bytes of its own, %d before others had rehearsed", with, without)
	}
	if got := inShell(t, next, "tr -d '\\0' < /dev/shm/work | wc -c; cat /warm"); got != "0\nwhole" {
		t.Errorf("the fork has %q", got)
	}
	stuck := errors.New("it is stuck")
	_, err = engine.ForkRehearsed(ctx, e, snap, engine.ForkOptions{}, func(context.Context, engine.Sandbox) error { return stuck })
	if !errors.Is(err, stuck) || !strings.Contains(err.Error(), snap.ID().String()) {
		t.Errorf("forked: %v", err)
	}
}
