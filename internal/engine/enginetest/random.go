package enginetest

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
)

// drawTasks is how many tasks of a guest draw random numbers at once.
const drawTasks = 3

// Random tests that forks share no random numbers. Tasks of a guest draw them all the
// time while the guest is forked. No value that was drawn after the instant of the
// fork may be found in two of the sandboxes; the source is one of them. The root
// filesystem contains the program of guest/rootfs/draw.c.
func Random(t *testing.T, e engine.Engine, spec engine.Spec) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	source, err := e.Boot(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	t.Run("fork", func(t *testing.T) {
		beginDrawing(t, source)
		snap, err := source.Snapshot(t.Context(), filepath.Join(t.TempDir(), "drawing"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = snap.Close() })
		logs := map[string]drawn{"the source": endDrawing(t, source)}
		for _, who := range []string{"the first fork", "the second fork"} {
			child, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = child.Close() })
			logs[who] = endDrawing(t, child)
		}
		compareDrawn(t, logs)
	})
	t.Run("live fork", func(t *testing.T) {
		beginDrawing(t, source)
		children, _ := liveFork(t, source, engine.ForkOptions{}, engine.ForkOptions{})
		compareDrawn(t, map[string]drawn{
			"the first child": endDrawing(t, children[0]), "the second child": endDrawing(t, children[1]),
			"the source": endDrawing(t, source),
		})
	})
}

func beginDrawing(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	sh(t, sb, fmt.Sprintf(`rm -rf /run/draw; mkdir /run/draw
draw /run/draw %d </dev/null >/dev/null 2>&1 &
while ! [ -e /run/draw/begun ]; do usleep 10000; done`, drawTasks))
}

// drawn holds the values that a sandbox drew. at maps each value to the time stamp
// counter read before it was drawn.
type drawn struct {
	at map[uint64]uint64
	n  int
}

// endDrawing ends the tasks and reads their logs.
func endDrawing(t *testing.T, sb engine.Sandbox) drawn {
	t.Helper()
	var out bytes.Buffer
	st, err := sb.Agent().Run(t.Context(), guestrpc.ExecRequest{Argv: []string{"sh", "-c", "draw /run/draw && cat /run/draw/log.*"}}, nil, &out, nil)
	if err != nil || st.Code != 0 || out.Len()%16 != 0 {
		t.Fatalf("read the logs: %+v, %v, %d bytes", st, err, out.Len())
	}
	d := drawn{at: map[uint64]uint64{}}
	for b := out.Bytes(); len(b) > 0; b = b[16:] {
		d.at[binary.LittleEndian.Uint64(b[8:])] = binary.LittleEndian.Uint64(b)
		d.n++
	}
	return d
}

// compareDrawn compares sandboxes that continue from one instant. A value was drawn
// before the instant if two sandboxes have it with the same time. The call under way
// in each task at the instant counts as before it.
func compareDrawn(t *testing.T, logs map[string]drawn) {
	t.Helper()
	for a, la := range logs {
		if len(la.at) != la.n {
			t.Errorf("%s drew %d values, %d of them twice", a, la.n, la.n-len(la.at))
		}
		for b, lb := range logs {
			if a >= b {
				continue
			}
			before, common := 0, 0
			for value, at := range la.at {
				switch other, has := lb.at[value]; {
				case has && other == at:
					before++
				case has:
					common++
				}
			}
			t.Logf("%s drew %d values, %s %d; %d before, %d of both after that", a, la.n, b, lb.n, before, common)
			if before < drawTasks || la.n-before < drawTasks || lb.n-before < drawTasks {
				t.Errorf("%s and %s: too little was drawn before or after the instant for a test", a, b)
			}
			if common > 0 {
				t.Errorf("%s and %s have %d values in common that were drawn after the instant", a, b, common)
			}
		}
	}
}
