package enginetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/snapshot"
)

// testLimits: a program that exceeds the memory, or writes more than its disk holds,
// harms no other program.
func (s *suite) testLimits(t *testing.T) {
	sb := s.fork(t, s.warm, engine.ForkOptions{})
	if got := sh(t, sb, "dd if=/dev/zero of=/big bs=1048576 2>&1 | grep -c 'No space left'; rm -f /big"); got != "1" {
		t.Errorf("a root filesystem that is full: %q", got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{"awk", `BEGIN { s = "0123456789abcdef"; while (1) s = s s }`}}, nil, nil, nil)
	switch {
	case err != nil && s.caps.EndsOutOfMemory:
		if why := sb.Wait(); !errors.Is(why, engine.ErrOutOfMemory) {
			t.Errorf("a program that wants all memory: %v, and the sandbox ended: %v", err, why)
		}
	case err != nil || st.Code == 0:
		t.Errorf("a program that wants all memory: %+v, %v", st, err)
	default:
		if got := sh(t, sb, "echo alive"); got != "alive" {
			t.Errorf("after it: %q", got)
		}
	}
	if got := sh(t, s.booted, "echo alive"); got != "alive" {
		t.Errorf("another sandbox: %q", got)
	}
}

// orphanEnv is the environment variable that turns a test's program into a parent to
// be killed.
const orphanEnv = "AGENTRUN_ENGINETEST_ORPHAN"

// orphan holds the instructions for that parent, and its report.
type orphan struct {
	Snapshot string `json:"snapshot"`
	Folder   string `json:"folder"`
	Error    string `json:"error,omitempty"`
}

// Orphan makes this process the parent of a sandbox, and waits to be killed, if the
// suite has started the process for that. Otherwise it returns at once. Programs that
// call Run call it first.
func Orphan(open func() (engine.Engine, error)) {
	text := os.Getenv(orphanEnv)
	if text == "" {
		return
	}
	var o orphan
	err := json.Unmarshal([]byte(text), &o)
	if err == nil {
		err = o.fork(open)
	}
	if err != nil {
		o.Error = err.Error()
	}
	if err := json.NewEncoder(os.Stdout).Encode(o); err != nil {
		os.Exit(1)
	}
	select {}
}

func (o *orphan) fork(open func() (engine.Engine, error)) error {
	e, err := open()
	if err != nil {
		return err
	}
	snap, err := snapshot.Open(o.Snapshot)
	if err != nil {
		return err
	}
	_, err = e.Fork(context.Background(), snap, engine.ForkOptions{Hostname: "orphan", Folder: o.Folder})
	return err
}

// testAdoption: a sandbox with a folder lives on when its maker is killed, and
// another process goes on with it.
func (s *suite) testAdoption(t *testing.T) {
	o := orphan{Snapshot: filepath.Join(s.dir, "warm"), Folder: folder(t)}
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), orphanEnv+"="+string(text))
	cmd.Env = append(cmd.Env, s.ChildEnv...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	err = json.NewDecoder(out).Decode(&o)
	_ = cmd.Process.Kill() // SIGKILL: it cannot say goodbye
	_ = cmd.Wait()
	if err != nil || o.Error != "" {
		t.Fatalf("%v %s", err, o.Error)
	}
	t.Cleanup(func() { _ = s.Engine.Remove(context.Background(), o.Folder) })
	pid, st, err := s.Engine.Inspect(o.Folder)
	if err != nil || pid == 0 || st.Own == 0 {
		t.Fatalf("process %d with %+v, %v: the sandbox has died with its parent", pid, st, err)
	}
	for range 2 { // an adopter that detaches does no harm either
		sb, err := s.Engine.Adopt(t.Context(), o.Folder)
		if err != nil {
			t.Fatal(err)
		}
		resume(t, sb)
		if got := sh(t, sb, "hostname; cat /warm"); got != "orphan\nwarmed up" {
			t.Errorf("the orphan says %q", got)
		}
		if st, err := sb.Stats(t.Context()); err != nil || st.Generation != 1 || st.Own == 0 {
			t.Errorf("stats %+v, %v", st, err)
		}
		if err := sb.Detach(); err != nil {
			t.Error(err)
		}
	}
	if err := s.Engine.Remove(t.Context(), o.Folder); err != nil {
		t.Fatal(err)
	}
	if id, err := procid.Of(pid); err == nil && id.Alive() {
		t.Error("a sandbox that was removed is still there")
	}
	if err := s.Engine.Keep(nil, []string{o.Snapshot}); err != nil {
		t.Error(err)
	}
}

// testDialTCP: where the engine has TCPPorts, Dial reaches a server inside. Data goes
// both ways, up to the end of each stream.
func (s *suite) testDialTCP(t *testing.T, sb engine.Sandbox) {
	const port = 7777
	sh(t, sb, fmt.Sprintf("nc -l -p %d -e cat </dev/null >/dev/null 2>&1 & while ! grep -q ':1E61 ' /proc/net/tcp /proc/net/tcp6; do usleep 10000; done", port))
	conn, err := sb.Dial(t.Context(), port)
	if (err == nil) != s.caps.TCPPorts {
		t.Fatalf("dial a TCP port: %v; the engine says that it can: %t", err, s.caps.TCPPorts)
	}
	if err == nil {
		defer func() { _ = conn.Close() }()
		echoed(t, conn)
	}
}
