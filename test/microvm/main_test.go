// Package microvm tests real Linux guests on real KVM, through the code that
// agentrun uses: a vmm process per guest, the guest kernel and the guest agent.
// make test runs it on the host's KVM if that is hardware-backed, and otherwise
// in the testbed.
package microvm

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/test/soak"
)

const mib = 1 << 20

// rootImage is an EROFS image of a busybox root, made once.
var rootImage string

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	enginetest.Orphan(func() (engine.Engine, error) { return engineIn(os.Getenv(dirEnv)) })
	dir, err := os.MkdirTemp("", "agentrun-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if rootImage, err = enginetest.MakeRoot(dir); err != nil {
		fmt.Fprintln(os.Stderr, "make a root filesystem for the tests:", err)
		return 1
	}
	return m.Run()
}

// testGuest is a booted guest. Its helpers fail the test.
type testGuest struct {
	engine.Sandbox
	process *process.Process
	t       testing.TB
}

// bootTimeout is generous: the testbed may share two slow cores.
const bootTimeout = 3 * time.Minute

// boot boots a guest with that many vCPUs; edit may change the spec further.
func boot(t testing.TB, vcpus int, edit ...func(*engine.Spec)) *testGuest {
	t.Helper()
	root, err := os.Open(rootImage)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	spec := engine.Spec{Root: root, Memory: 256 * mib, VCPUs: vcpus, Hostname: "test"}
	for _, e := range edit {
		e(&spec)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	defer cancel()
	sb, err := newEngine(t).Boot(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	g := &testGuest{Sandbox: sb, process: microvm.ProcessOf(sb), t: t}
	t.Cleanup(func() {
		if t.Failed() {
			if console, err := g.Console(context.Background()); err == nil {
				t.Logf("console:\n%s", console)
			} else {
				exit, console := g.process.Wait()
				t.Logf("the guest ended: %v; console:\n%s", exit, console)
			}
		}
		_ = g.Close() // it may have ended
	})
	return g
}

// result is the result of a command.
type result struct {
	status         guestrpc.ExitStatus
	stdout, stderr string
}

// run runs a program to its end.
func (g *testGuest) run(t testing.TB, req guestrpc.ExecRequest, stdin string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	var in *strings.Reader
	if stdin != "" {
		in = strings.NewReader(stdin)
	}
	var status guestrpc.ExitStatus
	var err error
	if in != nil {
		status, err = g.Agent().Run(t.Context(), req, in, &stdout, &stderr)
	} else {
		status, err = g.Agent().Run(t.Context(), req, nil, &stdout, &stderr)
	}
	if err != nil {
		t.Fatalf("run %q: %v", req.Argv, err)
	}
	return result{status, stdout.String(), stderr.String()}
}

// sh runs a shell command that must succeed and returns its output.
func (g *testGuest) sh(t testing.TB, format string, args ...any) string {
	t.Helper()
	script := fmt.Sprintf(format, args...)
	r := g.run(t, guestrpc.ExecRequest{Argv: []string{"sh", "-c", script}}, "")
	if r.status.Code != 0 {
		t.Fatalf("%s: exit code %d, stdout %q, stderr %q", script, r.status.Code, r.stdout, r.stderr)
	}
	return strings.TrimSpace(r.stdout)
}

// forEachSMP runs a test with 1 and with 2 vCPUs.
func forEachSMP(t *testing.T, test func(t *testing.T, vcpus int)) {
	for _, vcpus := range []int{1, 2} {
		t.Run(fmt.Sprintf("%dvCPU", vcpus), func(t *testing.T) { test(t, vcpus) })
	}
}

// soakEachSMP runs a test with 1 and with 2 vCPUs in make soak. In make test it
// uses only 2, because with 2 a guest does everything that it does with 1.
func soakEachSMP(t *testing.T, test func(t *testing.T, vcpus int)) {
	if soak.On() {
		forEachSMP(t, test)
		return
	}
	test(t, 2)
}
