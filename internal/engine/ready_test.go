package engine

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"

	"agentrun.dev/internal/guest/agent"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/snapshot"
)

// forked is a fork without a machine. Its agent is real; the calls of its other
// methods are recorded. Real machines are tested in test/microvm and test/gvisor.
type forked struct {
	Sandbox
	agent *guestrpc.Client
	did   []string
	fail  map[string]error
}

func newForked(t *testing.T) *forked {
	t.Helper()
	ours, theirs := net.Pipe()
	go func() { _ = guestrpc.Serve(context.Background(), theirs, &agent.Server{}) }()
	client, err := guestrpc.NewClient(t.Context(), ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() }) // it may be closed already
	return &forked{agent: client, fail: map[string]error{}}
}

func (f *forked) do(what string) error {
	f.did = append(f.did, what)
	return f.fail[what]
}

func (f *forked) Agent() *guestrpc.Client             { return f.agent }
func (f *forked) Park(context.Context) error          { return f.do("park") }
func (f *forked) Claim(context.Context, string) error { return f.do("claim") }
func (f *forked) Close() error                        { return f.do("close") }
func (f *forked) turn(context.Context) (func(), error) {
	return func() { _ = f.do("release") }, f.do("turn")
}

// TestMakeReady: a ready sandbox was claimed several times, and is parked. Each claim
// had a turn and gave it back.
func TestMakeReady(t *testing.T) {
	turns, atOnce := newForked(t), newForked(t)
	if err := errors.Join(makeReady(t.Context(), turns, turns.turn), makeReady(t.Context(), atOnce, nil)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		did, rehearsal []string
	}{
		{turns.did, []string{"turn", "claim", "park", "release"}},
		{atOnce.did, []string{"claim", "park"}},
	} {
		if want := append([]string{"park"}, slices.Repeat(c.rehearsal, rehearsals)...); !slices.Equal(c.did, want) {
			t.Errorf("%q, want %q", c.did, want)
		}
	}
}

// TestMakeReadyFails: a fork that cannot be made ready ends, and keeps no turn.
func TestMakeReadyFails(t *testing.T) {
	for step, want := range map[string][]string{
		"park":  {"park", "close"},
		"turn":  {"park", "turn", "close"},
		"claim": {"park", "turn", "claim", "release", "close"},
	} {
		t.Run(step, func(t *testing.T) {
			f := newForked(t)
			f.fail[step] = errors.New("no")
			if err := makeReady(t.Context(), f, f.turn); !errors.Is(err, f.fail[step]) || !slices.Equal(f.did, want) {
				t.Errorf("%v after %q, want %q", err, f.did, want)
			}
		})
	}
	f := newForked(t)
	if err := f.agent.Close(); err != nil {
		t.Fatal(err)
	}
	if err := makeReady(t.Context(), f, nil); err == nil || !slices.Equal(f.did, []string{"close"}) {
		t.Errorf("without an answer: %v after %q", err, f.did)
	}
}

// aheadEngine records how many spares were asked of it.
type aheadEngine struct {
	Engine
	asked int
	fail  error
}

func (e *aheadEngine) KeepSpares(_ *snapshot.Snapshot, n int) (Spares, error) {
	e.asked = n
	return noSpares{}, e.fail
}

// TestKeepSpares: an engine that is Ahead keeps spares, and another engine keeps an
// empty set.
func TestKeepSpares(t *testing.T) {
	e := &aheadEngine{}
	if _, err := KeepSpares(e, nil, 4); err != nil || e.asked != 4 {
		t.Errorf("%d spares, %v", e.asked, err)
	}
	e.fail = errors.New("no")
	if _, err := KeepSpares(e, nil, 1); !errors.Is(err, e.fail) {
		t.Errorf("%v", err)
	}
	var other struct{ Engine }
	s, err := KeepSpares(other, nil, 4)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.WaitFull(t.Context()), s.Close()); err != nil || s.Stats() != (SpareStats{}) {
		t.Errorf("%v, %+v", err, s.Stats())
	}
}
