package local

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/vmm/vmmctl"
)

func TestParseName(t *testing.T) {
	for _, good := range []string{"a", "0", "base", "base-1", "a--b", strings.Repeat("x", 63)} {
		if n, err := ParseName(good); err != nil || string(n) != good {
			t.Errorf("%q: %q, %v", good, n, err)
		}
	}
	for _, bad := range []string{"", "-a", "a-", ".", "..", "a/b", "../x", "A", "a.b", "a b", "ä", "a\n", strings.Repeat("x", 64), ".tmp-snapshot-1"} {
		if _, err := ParseName(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

// store opens an empty store. The vmm program must exist, but is not run.
func store(t *testing.T) *Store {
	t.Helper()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, string(assets.VMM)), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv(assets.EnvFolder, folder)
	s, err := Open(filepath.Join(t.TempDir(), "state"), microvm.JailPolicy{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), os.RemoveAll(s.resident)); err != nil {
			t.Error(err)
		}
	})
	return s
}

// TestLeftOvers: a sandbox that is half made, whose machine ended with an
// earlier boot of the host, or whose record is damaged, is listed as such and
// can be removed.
func TestLeftOvers(t *testing.T) {
	s := store(t)
	for name, tt := range map[Name]struct{ record, want string }{
		"half":    {"", "half made"},
		"damaged": {"{", "damaged"},
		"old":     {`{"life":3,"engine":"microvm"}`, engine.ErrEnded.Error()},
	} {
		dir, machine := s.sandboxDir(name), s.machineDir(name, 3)
		if err := os.MkdirAll(machine, 0o700); err != nil {
			t.Fatal(err)
		}
		const earlier = `{"process":{"pid":1,"start":1},"boot_id":"another"}`
		if err := os.WriteFile(filepath.Join(machine, "process.json"), []byte(earlier), 0o600); err != nil {
			t.Fatal(err)
		}
		if tt.record != "" {
			if err := os.WriteFile(filepath.Join(dir, recordName), []byte(tt.record), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Attach(t.Context(), name); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("attach to %s: %v does not say %q", name, err, tt.want)
		}
	}
	entries, err := s.List()
	if err != nil || len(entries) != 3 {
		t.Fatalf("%d entries, %v", len(entries), err)
	}
	for _, e := range entries {
		if e.Status == StatusRunning || e.Status == StatusReady {
			t.Errorf("%s is %s", e.Name, e.Status)
		}
		if err := s.Remove(t.Context(), e.Name); err != nil {
			t.Error(err)
		}
	}
	if entries, err := s.List(); err != nil || len(entries) != 0 {
		t.Errorf("%d entries are left, %v", len(entries), err)
	}
	if err := s.Remove(t.Context(), "half"); !errors.Is(err, ErrNotFound) {
		t.Errorf("removed again: %v", err)
	}
}

// TestInterruptedRemoval: a partly removed sandbox never appears complete or
// ended. It counts as half made from the start of the removal.
func TestInterruptedRemoval(t *testing.T) {
	s := store(t)
	freeze(t, s, "of")
	dir, machine := s.sandboxDir("box"), s.machineDir("box", 0)
	if err := os.MkdirAll(machine, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(s.snapshotDir("of"), folder.Folder(machine).From()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, recordName), []byte(`{"engine":"microvm"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	// The machine's process does not answer. The removal must not wait for it.
	socket, err := vmmctl.Listen(folder.Folder(machine).Control())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Remove(interrupted, "box"); err == nil {
		t.Fatal("the removal was not interrupted")
	}
	entries, err := s.List()
	if err != nil || len(entries) != 1 || !strings.Contains(entries[0].Status, "half made") {
		t.Errorf("%+v, %v", entries, err)
	}
}

func TestNotFound(t *testing.T) {
	s := store(t)
	if _, err := s.Fork(t.Context(), "nobody", []Name{"x"}, engine.Limits{}); !errors.Is(err, ErrNotFound) {
		t.Errorf("fork: %v", err)
	}
	if _, err := s.Attach(t.Context(), "nobody"); !errors.Is(err, ErrNotFound) {
		t.Errorf("attach: %v", err)
	}
	if err := s.Capture(t.Context(), "nobody", "x"); !errors.Is(err, ErrNotFound) {
		t.Errorf("capture: %v", err)
	}
	if names, err := s.FreeNames("base", 3); err != nil || len(names) != 3 || names[2] != "base-3" {
		t.Errorf("%v, %v", names, err)
	}
}
