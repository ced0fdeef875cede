package folder

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/procid"
)

func newFolder(t *testing.T) Folder {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "machine")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return Folder(dir)
}

// sleeper is a process that runs until it is killed.
func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reaped := make(chan struct{})
	go func() { // reaps it when it ends, as its parent would
		_ = cmd.Wait()
		close(reaped)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may be gone
		<-reaped
	})
	return cmd
}

// TestRecord: a record is read back, follows each change, and is void after a restart
// of the host.
func TestRecord(t *testing.T) {
	f, cmd := newFolder(t), sleeper(t)
	if err := f.Write(cmd.Process.Pid, Record{Hostname: "a", Generation: 1, Based: true}); err != nil {
		t.Fatal(err)
	}
	if err := f.Change(func(r *Record) { r.Generation++; r.Based = false }); err != nil {
		t.Fatal(err)
	}
	r, err := f.Read()
	if err != nil || r.Hostname != "a" || r.Generation != 2 || r.Based || r.Process.PID != cmd.Process.Pid {
		t.Errorf("%+v, %v", r, err)
	}
	if pid, err := f.Process(); err != nil || pid != cmd.Process.Pid {
		t.Errorf("process %d, %v", pid, err)
	}
	if err := f.Change(func(r *Record) { r.BootID = "another" }); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Read(); !errors.Is(err, engine.ErrEnded) {
		t.Errorf("of another boot: %v", err)
	}
	if err := Folder("").Change(func(*Record) { t.Error("changed") }); err != nil {
		t.Errorf("no folder: %v", err)
	}
	for _, left := range []string{"", "{"} { // the remains after a power cut
		if err := os.WriteFile(f.record(), []byte(left), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Read(); !errors.Is(err, engine.ErrEnded) {
			t.Errorf("a damaged record %q: %v", left, err)
		}
	}
	if err := os.Remove(f.record()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Read(); !errors.Is(err, engine.ErrEnded) {
		t.Errorf("no record: %v", err)
	}
}

// TestSpeaks: the version of a record that an older AgentRun has written follows from
// Streams and Wires. New records set both for an older AgentRun to read.
func TestSpeaks(t *testing.T) {
	f, cmd := newFolder(t), sleeper(t)
	for text, want := range map[string]int{
		`{}`: 1, `{"streams":true}`: 2, `{"streams":true,"wires":true}`: 3,
		`{"protocol":2,"streams":true}`: 2, `{"protocol":7,"streams":true,"wires":true}`: 7,
	} {
		var r Record
		if err := json.Unmarshal([]byte(text), &r); err != nil || r.Speaks() != want {
			t.Errorf("%s speaks version %d, not %d, %v", text, r.Speaks(), want, err)
		}
		if err := f.Write(cmd.Process.Pid, Record{Protocol: want}); err != nil {
			t.Fatal(err)
		}
		got, err := f.Read()
		if err != nil || got.Protocol != want || got.Streams != (want >= 2) || got.Wires != (want >= 3) {
			t.Errorf("version %d is written as %+v, %v", want, got, err)
		}
	}
}

// TestRemove: Remove kills a recorded process. Without a record it stops the process
// at the socket. A record of an earlier boot of the host is ignored.
func TestRemove(t *testing.T) {
	stopped := 0
	stop := func(context.Context, string) error { stopped++; return nil }
	written, cmd := newFolder(t), sleeper(t)
	if err := written.Write(cmd.Process.Pid, Record{}); err != nil {
		t.Fatal(err)
	}
	id, err := procid.Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := written.Remove(t.Context(), stop); err != nil || id.Alive() || stopped != 0 {
		t.Errorf("%v, alive %t, stopped %d", err, id.Alive(), stopped)
	}
	half := newFolder(t)
	if err := half.Remove(t.Context(), stop); err != nil || stopped != 1 {
		t.Errorf("half made: %v, stopped %d", err, stopped)
	}
	earlier, other := newFolder(t), sleeper(t)
	if err := earlier.Write(other.Process.Pid, Record{}); err != nil {
		t.Fatal(err)
	}
	if err := earlier.Change(func(r *Record) { r.BootID = "another" }); err != nil {
		t.Fatal(err)
	}
	if err := earlier.Remove(t.Context(), stop); err != nil || stopped != 2 {
		t.Errorf("of another boot: %v, stopped %d", err, stopped)
	}
	if id, err := procid.Of(other.Process.Pid); err != nil || !id.Alive() {
		t.Error("a process that has the number now was killed")
	}
	for _, f := range []Folder{written, half, earlier} {
		if _, err := os.Stat(string(f)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there: %v", f, err)
		}
	}
	failed := errors.New("it does not stop")
	kept := newFolder(t)
	if err := kept.Remove(t.Context(), func(context.Context, string) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(string(kept)); err != nil {
		t.Errorf("the folder of what runs on is gone: %v", err)
	}
}
