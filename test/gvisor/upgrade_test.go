package gvisor

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/gvisor"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/snapshot"
)

// installation is a host on which one AgentRun replaces another.
type installation struct {
	*testing.T
	helpers string // the folder of kept helpers; if it is empty, helpers are not kept
}

// engine opens the engine of the AgentRun that is installed now.
func (in *installation) engine() *gvisor.Engine {
	in.Helper()
	cfg := config(enginetest.TempDir(in.T))
	cfg.Helpers, cfg.Precreate = in.helpers, 1
	return newEngine(in.T, cfg)
}

// kept returns the number of kept builds of the helper.
func (in *installation) kept() int {
	in.Helper()
	entries, err := os.ReadDir(in.helpers)
	if err != nil {
		in.Fatal(err)
	}
	return len(entries)
}

// collect makes an engine delete the helpers that neither running sandboxes nor these
// snapshots need.
func (in *installation) collect(e *gvisor.Engine, snapshots ...string) {
	in.Helper()
	if err := e.KeepPrograms(func() ([]string, error) { return snapshots, nil }); err != nil {
		in.Error(err)
	}
}

// running leaves a sandbox that outlives its engine, with a file in its memory.
func (in *installation) running(e *gvisor.Engine, from *snapshot.Snapshot) (dir string) {
	in.Helper()
	dir = in.TempDir()
	sb, err := e.Fork(in.Context(), from, engine.ForkOptions{Folder: dir})
	if err != nil {
		in.Fatal(err)
	}
	sh(in.T, sb, hold)
	if err := sb.Detach(); err != nil {
		in.Fatal(err)
	}
	return dir
}

// adopt adopts such a sandbox.
func (in *installation) adopt(e *gvisor.Engine, dir string) engine.Sandbox {
	in.Helper()
	sb, err := e.Adopt(in.Context(), dir)
	if err == nil {
		in.Cleanup(func() { _ = sb.Close() })
		err = sb.Resume(in.Context())
	}
	if err != nil {
		in.Fatal(err)
	}
	return sb
}

// hold writes a file into a sandbox's memory, and held reads it.
const (
	hold = "echo kept >/dev/shm/held"
	held = "cat /dev/shm/held"
)

// holds fails the test unless the sandbox has hold's file in its memory. It
// ends the sandbox.
func (in *installation) holds(what string, sb engine.Sandbox, err error) {
	in.Helper()
	if err != nil {
		in.Errorf("%s: %v", what, err)
		return
	}
	if got := strings.TrimSpace(sh(in.T, sb, held)); got != "kept" {
		in.Errorf("%s holds %q", what, got)
	}
	if err := sb.Close(); err != nil {
		in.Error(err)
	}
}

// hibernate writes a sandbox of an engine to disk, and ends it.
func (in *installation) hibernate(sb engine.Sandbox) (dir string) {
	in.Helper()
	dir = filepath.Join(in.TempDir(), "asleep")
	if err := sb.Pause(in.Context()); err != nil {
		in.Fatal(err)
	}
	snap, err := sb.Snapshot(in.Context(), dir)
	if err == nil {
		err = errors.Join(snap.Close(), sb.Close())
	}
	if err != nil {
		in.Fatal(err)
	}
	return dir
}

// wake forks the snapshot of a hibernated sandbox.
func (in *installation) wake(e *gvisor.Engine, dir string) (engine.Sandbox, error) {
	snap, err := snapshot.Open(dir)
	if err != nil {
		return nil, err
	}
	in.Cleanup(func() { _ = snap.Close() })
	return e.Fork(in.Context(), snap, engine.ForkOptions{KeepIdentity: true})
}

// TestUpgradedHelper: after an upgrade to another build of the helper, sandboxes and
// snapshots of the old build keep using the old one. It is kept as long as something needs
// it: running sandboxes, their live forks, hibernated sandboxes, forks of snapshots.
func TestUpgradedHelper(t *testing.T) {
	in := &installation{t, filepath.Join(t.TempDir(), "helpers")}
	old := in.engine()
	booted := boot(t, old)
	template := freeze(t, booted)
	if err := booted.Close(); err != nil {
		t.Fatal(err)
	}
	source, err := old.Fork(t.Context(), template, engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sh(t, source, hold)
	asleep := in.hibernate(source)
	dir := in.running(old, template)
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}

	upgrade(t)
	e := in.engine()
	for range 2 { // the second fork gets a sandbox that was made ahead
		sb, err := in.wake(e, asleep)
		in.holds("what was hibernated", sb, err)
		if err := e.Precreated(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sb := in.adopt(e, dir)
	children, err := sb.Fork(t.Context(), []engine.ForkOptions{{}, {Folder: t.TempDir()}})
	if err = errors.Join(err, children.Errs[0], children.Errs[1]); err != nil {
		t.Fatal(err)
	}
	in.holds("a live fork", children.Forks[0], nil)
	again := in.hibernate(children.Forks[1])
	sb2, err := in.wake(e, again)
	in.holds("a live fork that was hibernated", sb2, err)

	// Outdated distinguishes snapshots of the old build from those of the new
	// one.
	now := freeze(t, boot(t, e))
	if why, err := e.Outdated(template.Manifest()); err != nil || !strings.Contains(why, "another build of gvisor-helper") {
		t.Errorf("a template of the old build is outdated: %q, %v", why, err)
	}
	if why, err := e.Outdated(now.Manifest()); err != nil || why != "" {
		t.Errorf("a template of the new build is outdated: %q, %v", why, err)
	}

	// The old build is deleted with the last user of it.
	if err := errors.Join(sb.Detach(), e.Close()); err != nil { // with the sandboxes that it has made ahead
		t.Fatal(err)
	}
	e = in.engine()
	sb = in.adopt(e, dir)
	if in.collect(e); in.kept() != 2 {
		t.Errorf("%d builds are kept while a sandbox of the old one runs", in.kept())
	}
	in.holds("the sandbox that goes on", sb, nil)
	if in.collect(e, asleep); in.kept() != 2 {
		t.Errorf("%d builds are kept with a hibernated sandbox of the old one", in.kept())
	}
	if in.collect(e); in.kept() != 1 {
		t.Errorf("%d builds are kept in the end", in.kept())
	}
	if _, err := in.wake(e, asleep); !errors.Is(err, engine.ErrMismatch) || !strings.Contains(err.Error(), "another build of gvisor-helper") {
		t.Errorf("without its helper: %v", err)
	}
	if why, err := e.Outdated(template.Manifest()); err != nil || why == "" {
		t.Errorf("a template that cannot be used is not outdated, %v", err)
	}
}

// TestUpgradedWithoutKept: a sandbox of an AgentRun that kept no helpers continues. Its forks
// need its helper: they get it from the program of its process, or fail with ErrMismatch if
// helpers are not kept.
func TestUpgradedWithoutKept(t *testing.T) {
	in := &installation{T: t}
	old := in.engine()
	dir := in.running(old, freeze(t, boot(t, old)))
	upgrade(t)
	e := in.engine()
	sb := in.adopt(e, dir)
	if _, err := sb.Fork(t.Context(), []engine.ForkOptions{{}}); !errors.Is(err, engine.ErrMismatch) {
		t.Errorf("a fork where nothing is kept: %v", err)
	}
	if err := sb.Detach(); err != nil {
		t.Fatal(err)
	}
	in.helpers = filepath.Join(t.TempDir(), "helpers")
	e = in.engine()
	sb = in.adopt(e, dir)
	children, err := sb.Fork(t.Context(), []engine.ForkOptions{{}})
	if err != nil {
		t.Fatal(err)
	}
	in.holds("a live fork", children.Forks[0], children.Errs[0])
	asleep := in.hibernate(sb)
	sb, err = in.wake(e, asleep)
	in.holds("what was hibernated", sb, err)
}

// TestDamagedHelper: a kept helper is verified before it runs.
func TestDamagedHelper(t *testing.T) {
	in := &installation{t, filepath.Join(t.TempDir(), "helpers")}
	old := in.engine()
	template := freeze(t, boot(t, old))
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(in.helpers, string(assets.GVisorHelper)+"-"+template.Manifest().GVisor.Helper)
	program, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	program[len(program)/2] ^= 1
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, program, 0o500); err != nil {
		t.Fatal(err)
	}
	upgrade(t)
	if _, err := in.engine().Fork(t.Context(), template, engine.ForkOptions{}); !errors.Is(err, engine.ErrMismatch) || !strings.Contains(err.Error(), path) {
		t.Errorf("a damaged helper: %v", err)
	}
}

// upgrade makes engines that are opened from now on find another build of the helper.
// It is the same program with another digest, because bytes after the end of a program
// are never read.
func upgrade(t *testing.T) {
	t.Helper()
	path, err := assets.Path(assets.GVisorHelper)
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	install(t, append(program, "another"...))
}

// install makes engines that are opened from now on find another helper.
func install(t *testing.T, helper []byte) {
	t.Helper()
	from, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	to := t.TempDir()
	entries, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != string(assets.GVisorHelper) {
			if err := os.Symlink(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.WriteFile(filepath.Join(to, string(assets.GVisorHelper)), helper, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv(assets.EnvFolder, to)
}

// TestOlderHelper: a helper without the newest operation of the protocol says so. The engine
// refuses that operation by name. The sandbox continues and can do everything else.
func TestOlderHelper(t *testing.T) {
	in := &installation{t, filepath.Join(t.TempDir(), "helpers")}
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	older, err := os.ReadFile(filepath.Join(folder, "updates", "older", string(assets.GVisorHelper)))
	if err != nil {
		t.Fatalf("%v: run make build", err)
	}
	install(t, older)
	old := in.engine()
	s := spec(t)
	s.Network = &engine.Network{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24")}
	booted, err := old.Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = booted.Close() }()
	dir := in.running(old, freeze(t, booted))

	t.Setenv(assets.EnvFolder, folder)
	e := in.engine()
	sb := in.adopt(e, dir)
	if wire, err := sb.Wire(); !errors.Is(err, engine.ErrOldWire) {
		t.Errorf("its wire is %v, %v", wire, err)
	}
	asleep := in.hibernate(sb)
	sb, err = in.wake(e, asleep)
	if err != nil {
		t.Fatal(err)
	}
	wire, err := sb.Wire()
	if err != nil {
		t.Errorf("whoever wakes it has no wire: %v", err)
	}
	_ = wire.Close() // nil is refused
	in.holds("what was hibernated", sb, nil)
}
