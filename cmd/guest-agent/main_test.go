package main

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// TestMain lets the test binary be the agent itself.
func TestMain(m *testing.M) {
	if os.Getenv("GUEST_AGENT_TEST") == "1" {
		os.Unsetenv("GUEST_AGENT_TEST")
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestAgentOnAUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	cmd := exec.Command(os.Args[0], "--listen-unix", path)
	cmd.Env = append(os.Environ(), "GUEST_AGENT_TEST=1")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := guestrpc.NewClient(ctx, dial(ctx, t, path))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	exit, err := c.Run(ctx, guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", "echo hello; exit 7"}, Workdir: "/"}, nil, &out, nil)
	if err != nil || exit.Code != 7 || out.String() != "hello\n" {
		t.Errorf("%+v, %q, %v", exit, &out, err)
	}
	info, err := c.Info(ctx)
	if err != nil || info.AgentVersion != version {
		t.Errorf("%+v, %v", info, err)
	}
	// Outside of a VM the agent must not change the machine.
	if reply, err := c.Renew(ctx, guestrpc.RenewRequest{Entropy: make([]byte, guestrpc.MinEntropy), Generation: 1}); err == nil || !strings.Contains(err.Error(), "not PID 1") {
		t.Errorf("renewed on a host: %+v, %v", reply, err)
	}
}

// dial tries until the agent listens, because a unix socket has no event for that.
func dial(ctx context.Context, t *testing.T, path string) net.Conn {
	t.Helper()
	for {
		conn, err := net.Dial("unix", path)
		if err == nil {
			return conn
		}
		select {
		case <-ctx.Done():
			t.Fatal(err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestRunElsewhereSaysWhatToDo(t *testing.T) {
	for _, args := range [][]string{nil, {"--listen-unix"}, {"--what"}} {
		cmd := exec.Command(os.Args[0], args...)
		cmd.Env = append(os.Environ(), "GUEST_AGENT_TEST=1")
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "--listen-unix PATH") {
			t.Errorf("%v: %q, %v", args, out, err)
		}
	}
	if err := run([]string{"--listen-unix", "/no/such/folder/x"}); err == nil {
		t.Error("listened on nothing")
	}
}

// TestAgentStaysLean keeps packages out of the agent that cost every fork
// memory at start, or that pull in reflection.
func TestAgentStaysLean(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	deps := strings.Fields(string(out))
	for _, bad := range []string{"net", "net/http", "encoding/json", "encoding/gob", "os/exec", "os/user", "log", "log/slog", "flag", "text/template", "regexp"} {
		if slices.Contains(deps, bad) {
			t.Errorf("the agent imports %s", bad)
		}
	}
}
