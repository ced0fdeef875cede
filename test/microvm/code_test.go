package microvm

import (
	"bytes"
	"fmt"
	"io"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
)

// TestCodeForks: every fork has the state of an interpreter. An execution that
// runs at the instant of the fork continues in each fork and can be attached to
// there. The root has no Python, so the interpreter is its shell.
func TestCodeForks(t *testing.T) {
	e := newEngine(t)
	source, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: 1, Scratch: 64 * mib})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	run := func(sb engine.Sandbox, source string) string {
		t.Helper()
		var stdout, stderr bytes.Buffer
		status, err := sb.Agent().RunCode(t.Context(), guestrpc.CodeRunRequest{Language: "bash", Source: source}, &stdout, &stderr, nil)
		if err != nil || status.State != guestrpc.CodeOK || status.Code != 0 {
			t.Fatalf("%q: %+v, %v, stderr %q", source, status, err, &stderr)
		}
		return stdout.String()
	}
	run(source, "x=from-the-source; cd /tmp; f() { echo \"$x in $PWD\"; }")
	x, err := source.Agent().StartCode(t.Context(), guestrpc.CodeRunRequest{
		ID: "through", Language: "bash", Source: "echo begun; until [ -e /tmp/gate ]; do usleep 10000; done; x=\"$x-$(cat /tmp/gate)\"; echo $x",
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(x.Stdout(), make([]byte, len("begun\n"))); err != nil {
		t.Fatal(err)
	}
	resume := x.Resume()
	f, err := source.Fork(t.Context(), make([]engine.ForkOptions, 2))
	if err != nil {
		t.Fatal(err)
	}
	all := append([]engine.Sandbox{source}, f.Forks...)
	for i, sb := range all {
		if i > 0 && f.Errs[i-1] != nil {
			t.Fatal(f.Errs[i-1])
		}
		y := x
		if sb != source {
			t.Cleanup(func() { _ = sb.Close() })
			if y, err = sb.Agent().AttachCode(t.Context(), resume); err != nil {
				t.Fatalf("attach in fork %d: %v", i, err)
			}
		}
		command(t, sb, fmt.Sprintf("echo %d > /tmp/gate.new; mv /tmp/gate.new /tmp/gate", i))
		var out bytes.Buffer
		status, err := y.Copy(&out, nil, nil)
		if want := fmt.Sprintf("from-the-source-%d\n", i); err != nil || status.Code != 0 || out.String() != want {
			t.Errorf("fork %d: %+v, %v, stdout %q, want %q", i, status, err, &out, want)
		}
	}
	for i, sb := range all {
		if got, want := run(sb, "f"), fmt.Sprintf("from-the-source-%d in /tmp\n", i); got != want {
			t.Errorf("fork %d: %q, want %q", i, got, want)
		}
	}
}
