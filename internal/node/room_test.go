package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// smallDisk mounts a file system of so many MiB, and returns a folder on it.
func smallDisk(t *testing.T, mibs int) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", mibs)); err != nil {
		t.Skipf("a small disk needs a mount: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	state := filepath.Join(dir, "state")
	must(t, os.Mkdir(state, 0o700))
	return state
}

// fillUntil takes room of a disk until so much is free, and returns the file that has it.
func fillUntil(t *testing.T, m *Manager, left uint64) (filler string) {
	t.Helper()
	filler = filepath.Join(filepath.Dir(m.cfg.Dir), "filler")
	f, err := os.OpenFile(filler, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	must(t, err)
	defer func() { must(t, f.Close()) }()
	for {
		free, err := m.room.free()
		must(t, err)
		if free <= left {
			return filler
		}
		_, err = f.Write(make([]byte, min(free-left, 1<<20)))
		must(t, err)
	}
}

// wantNoRoom checks that a call was refused because of the node's disk, with
// advice.
func wantNoRoom(t *testing.T, what string, err error) {
	t.Helper()
	if !sandbox.HasCode(err, sandbox.CodeCapacity) || !strings.Contains(err.Error(), "disk of the node") || !strings.Contains(err.Error(), "Delete checkpoints") {
		t.Errorf("%s: %v", what, err)
	}
}

// TestReserve: storage by tenants is refused before it reduces the reserve of the disk.
// Claims, forks, ends and deletions keep working, and everything else once there is room
// again.
func TestReserve(t *testing.T) {
	state := smallDisk(t, 64)
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, state, h, func(c *Config) { c.StorageReserve = 16 * mib })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		ctx := t.Context()
		for _, name := range []string{"a", "b", "c"} {
			claim(t, m, name, sandbox.Lifetime{})
		}
		must(t, second(m.Hibernate(ctx, key("c"))))
		checkpoint(t, m, "old", "b")
		spec := sandbox.TemplateSpec{Image: "two", MilliCPUs: 1000, Memory: 64 * mib}
		store := map[string]func() error{
			"hibernate":  func() error { return second(m.Hibernate(ctx, key("a"))) },
			"checkpoint": func() error { return third(m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("new"), Source: "a"})) },
		}
		// A machine of these tests says that it has 5 MiB on its disk, and some of memory.
		filler := fillUntil(t, m, 20*mib)
		paused := 0
		for what, do := range store {
			wantNoRoom(t, what+" with less room than it needs", do())
		}
		fillUntil(t, m, 15*mib)
		h.Step = func() { paused++ }
		for what, do := range store {
			wantNoRoom(t, what+" within the reserve", do())
		}
		_, err := m.ApplyTemplate(ctx, key("two"), spec)
		wantNoRoom(t, "a template", err)
		if paused > 0 {
			t.Error("a sandbox was stopped to be refused")
		}
		h.Step = nil
		wantState(t, m, "a", sandbox.Running)
		wantFolders(t, m, imagesDir, 1)
		wantFolders(t, m, checkpointsDir, 1)
		// An existing template can be applied, because that builds nothing.
		must(t, second(m.ApplyTemplate(ctx, key("python"), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib})))
		claim(t, m, "d", sandbox.Lifetime{})
		must(t, third(m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 2}})))
		must(t, second(m.Resume(ctx, key("c"))), m.DeleteCheckpoint(ctx, key("old")), second(m.Kill(ctx, key("d"))))
		must(t, os.Remove(filler))
		for what, do := range store {
			if err := do(); err != nil {
				t.Errorf("%s with room: %v", what, err)
			}
		}
		must(t, second(m.ApplyTemplate(ctx, key("two"), spec)), waitBuilt(t, m, "two"))
	})
}

// TestReserveOfSeveral: data that is being stored counts for later calls, although it
// is not on the disk yet.
func TestReserveOfSeveral(t *testing.T) {
	state := smallDisk(t, 64)
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, state, h, func(c *Config) { c.StorageReserve = 16 * mib })
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		ctx := t.Context()
		claim(t, m, "a", sandbox.Lifetime{})
		claim(t, m, "b", sandbox.Lifetime{})
		fillUntil(t, m, 28*mib) // room for one of two
		asked := h.HangCaptures()
		first := make(chan error)
		go func() { first <- second(m.Hibernate(ctx, key("a"))) }()
		<-asked
		patient, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		wantNoRoom(t, "beside another", second(m.Hibernate(patient, key("b"))))
		wantNoRoom(t, "beside another", third(m.Checkpoint(patient, sandbox.CheckpointRequest{Key: key("c"), Source: "b"})))
		must(t, second(m.Kill(ctx, key("a"))))
		if err := <-first; err == nil {
			t.Error("a sandbox that was killed hibernated")
		}
		if m.room.pledged != 0 {
			t.Errorf("%d bytes are being stored by nobody", m.room.pledged)
		}
	})
}

// hungry is a builder that takes half of the disk and then waits for its end.
type hungry struct {
	builder
	m      *Manager
	t      *testing.T
	filler string
}

func (b *hungry) Build(ctx context.Context, req BuildRequest) (sandbox.Built, error) {
	if req.Spec.Image != "hungry" {
		return b.builder.Build(ctx, req)
	}
	b.filler = fillUntil(b.t, b.m, 7*mib)
	select {
	case <-ctx.Done():
	case <-time.After(time.Hour):
		return sandbox.Built{}, errors.New("it was not ended")
	}
	must(b.t, os.Remove(b.filler))
	return sandbox.Built{}, ctx.Err()
}

// TestBuildTakesTheReserve: a build that takes more than half of the reserve is ended, says
// why, and is tried again.
func TestBuildTakesTheReserve(t *testing.T) {
	state := smallDisk(t, 64)
	synctest.Test(t, func(t *testing.T) {
		b := &hungry{t: t}
		m := daemon(t, state, nodetest.NewHost(t), func(c *Config) { c.StorageReserve, c.Builder = 16*mib, b })
		defer func() { _ = m.Close() }()
		b.m = m
		begin := time.Now()
		tmpl, err := m.ApplyTemplate(t.Context(), key("hungry"), sandbox.TemplateSpec{Image: "hungry", MilliCPUs: 1000, Memory: 64 * mib})
		must(t, err)
		time.Sleep(2 * watchEvery)
		synctest.Wait()
		if took := time.Since(begin); took > time.Second {
			t.Errorf("it went on for %v", took)
		}
		found, err := m.Builds(t.Context(), tmpl)
		if err != nil || len(found) != 1 || found[0].Phase != sandbox.PhasePending || !strings.Contains(found[0].Problem, "disk of the node") {
			t.Errorf("%+v, %v", found, err)
		}
	})
}

// TestBrim: on a disk without a free byte sandboxes are listed, used, ended and deleted, by
// the daemon that was there and by the next; nothing new is made once half of the journal's
// room is used. All is as before when there is room.
func TestBrim(t *testing.T) {
	state := smallDisk(t, 32)
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		open := func() *Manager { return daemon(t, state, h, func(c *Config) { c.StorageReserve = mib }) }
		m := open()
		defer func() { _ = m.Close() }()
		setUp(t, m, 0)
		ctx := t.Context()
		for _, name := range []string{"a", "b", "c"} {
			claim(t, m, name, sandbox.Lifetime{})
		}
		must(t, second(m.Hibernate(ctx, key("c"))))
		checkpoint(t, m, "old", "b")
		filler := fillUntil(t, m, 0)
		// Folders of machines need room, too, and existing ones are never renamed.
		metadata := map[string]string{"text": strings.Repeat("x", 3000)}
		var err error
		for i := 0; err == nil && i < 2000; i++ {
			k := key(fmt.Sprintf("more-%d", i))
			if _, _, err = m.Claim(ctx, sandbox.ClaimRequest{Key: k, Spec: sandbox.ClaimSpec{Pool: "pool", Metadata: metadata}}); err == nil {
				must(t, second(m.Kill(ctx, k)))
			}
		}
		if err != nil && !sandbox.HasCode(err, sandbox.CodeCapacity) && !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("what is new: %v", err)
		}
		must(t, m.Close())
		m = open()
		list, err := m.Sandboxes(ctx, sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace})
		if err != nil || len(list) != 3 {
			t.Errorf("%d sandboxes, %v", len(list), err)
		}
		must(t, second(m.Pause(ctx, key("b"))), second(m.Kill(ctx, key("b"))), second(m.Kill(ctx, key("c"))), m.DeleteCheckpoint(ctx, key("old")))
		must(t, os.Remove(filler))
		claim(t, m, "d", sandbox.Lifetime{})
		must(t, second(m.Hibernate(ctx, key("d"))), second(m.Resume(ctx, key("d"))))
		checkpoint(t, m, "new", "d")
	})
}
