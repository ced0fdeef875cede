package forkd

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/test/soak"
)

// updater is a node whose AgentRun is updated. The running sandboxes, hibernated ones and
// checkpoints must survive, each with a marker in the memory of its interpreter.
type updater struct {
	*user
	now                        string // the AgentRun that is installed
	running, hibernated, saved []string
}

// TestUpdate: the helper and the vmm are updated and downgraded again, with the same
// agentrun: to the same source with another stamp, and to a build without the newest
// operation of each control protocol. Sandboxes keep their memory, and can be forked, woken
// and restored. Claims are served at once, and pools get a snapshot of the installed build.
func TestUpdate(t *testing.T) {
	main, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	for _, build := range []string{"stamped", "older"} {
		t.Run(build, func(t *testing.T) {
			u := &updater{user: &user{node: newNode(t), name: "u", holds: map[string]string{}}}
			other := filepath.Join(main, "updates", build)
			u.install(build, other)
			u.up()
			u.template(pythonImage(t))
			u.make("old", soak.Count(10, 2), soak.Count(3, 1))
			old := u.installed()

			u.update("main", main)
			u.everything("after the update")
			u.make("new", 1, 1)
			u.renewed("after the update")

			u.update(build, other)
			u.everything("after it was taken back")
			u.renewed("after it was taken back")
			if now := u.installed(); now != old {
				t.Errorf("the helper was %s and is %s", old, now)
			}
			u.drop()
			u.onlyInstalled()
			u.end(new(traces))
		})
	}
}

// update ends the daemon and starts that of another AgentRun.
func (u *updater) update(name, folder string) {
	u.t.Helper()
	u.down()
	u.install(name, folder)
	u.up()
}

func (u *updater) install(name, folder string) {
	u.t.Helper()
	u.now = name
	u.Install(u.t, name, folder)
}

// make makes sandboxes that keep running, and hibernated sandboxes and
// checkpoints, as many of each as others says.
func (u *updater) make(prefix string, running, others int) {
	u.t.Helper()
	ctx := u.t.Context()
	claimed := func(kind string, i int) string {
		u.t.Helper()
		name := fmt.Sprintf("%s-%s-%d", prefix, kind, i)
		_, err := u.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: "pool"}, "")
		if err == nil {
			u.holds[name], err = u.mark(ctx, name)
		}
		if err != nil {
			u.t.Fatalf("%s: %v", name, err)
		}
		return name
	}
	for i := range running {
		u.running = append(u.running, claimed("runs", i))
	}
	for i := range others {
		name := claimed("sleeps", i)
		if _, err := u.Client.Do(ctx, name, client.Hibernate); err != nil {
			u.t.Fatal(err)
		}
		u.hibernated = append(u.hibernated, name)
	}
	for i := range others {
		name := claimed("saved", i)
		_, err := u.Client.Checkpoint(ctx, name, rest.CheckpointCreate{Name: name}, "")
		if err == nil {
			_, err = u.Client.Kill(ctx, name)
		}
		if err != nil {
			u.t.Fatal(err)
		}
		u.saved = append(u.saved, name)
	}
}

// everything fails the test unless all earlier sandboxes and checkpoints exist and
// work.
func (u *updater) everything(when string) {
	u.t.Helper()
	ctx := u.t.Context()
	report := func(name, what string, err error) {
		u.t.Helper()
		if err != nil {
			u.t.Errorf("%s: %s of %s: %v", when, what, name, err)
		}
	}
	// A claim does not wait for a build.
	p, err := u.Client.Pool(ctx, "pool")
	report("pool", "state", err)
	u.made++
	name := fmt.Sprintf("claimed-%d", u.made)
	s, err := u.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: "pool"}, "")
	report("pool", "claim", err)
	if p.Phase == rest.PhaseBuilding && !strings.Contains(p.Problem, "made anew") {
		u.t.Errorf("%s the pool is %s: %q", when, p.Phase, p.Problem)
	}
	u.t.Logf("%s the pool was %s (%s), and a claim was served by revision %s", when, p.Phase, p.Problem, s.Revision)
	if err == nil {
		_, err = u.Client.RunCode(ctx, name, rest.CodeRequest{Code: "assert warm == 1"})
		report(name, "code", err)
		_, err = u.Client.Kill(ctx, name)
		report(name, "end", err)
	}
	for _, name := range u.running {
		report(name, "memory", u.check(ctx, name))
		before := maps.Clone(u.holds)
		report(name, "fork", u.fork(ctx, name))
		for child := range u.holds {
			if _, was := before[child]; !was {
				_, err := u.Client.Kill(ctx, child)
				report(child, "end", err)
			}
		}
		u.holds = before
	}
	for _, name := range u.hibernated {
		_, err := u.Client.Do(ctx, name, client.Resume)
		report(name, "waking", err)
		report(name, "memory", u.check(ctx, name))
		_, err = u.Client.Do(ctx, name, client.Hibernate)
		report(name, "hibernation", err)
	}
	for _, name := range u.saved {
		u.made++
		restored := fmt.Sprintf("%s-%d", u.name, u.made)
		u.holds[restored] = u.holds[name]
		_, err := u.Client.Restore(ctx, name, rest.CheckpointRestore{Name: restored}, "")
		report(name, "restore", err)
		report(restored, "memory", u.check(ctx, restored))
		_, err = u.Client.Kill(ctx, restored)
		report(restored, "end", err)
		delete(u.holds, restored)
	}
}

// renewed waits until the pool comes from the installed AgentRun. It fails the test
// unless the pool says so and has one snapshot on disk, without the earlier one.
func (u *updater) renewed(when string) {
	u.t.Helper()
	u.until(when+" the pool has what waits of a snapshot of this AgentRun", func() error {
		p, err := u.Client.Pool(u.t.Context(), "pool")
		if err != nil || p.Phase != rest.PhaseReady || p.Ready < 2 || p.Snapshots < 2 || p.Problem != "" {
			return errors.Join(fmt.Errorf("the pool: %+v", p), err)
		}
		list, err := u.entries("snapshots")
		if err != nil || len(list) != 1 {
			return errors.Join(fmt.Errorf("%d snapshots are on disk", len(list)), err)
		}
		m, err := snapshot.ReadManifest(list[0])
		if err != nil || m.GVisor != nil && m.GVisor.Helper != u.installed() {
			return errors.Join(errors.New("the snapshot is of another AgentRun"), err)
		}
		return nil
	})
}

// installed returns the digest of the installed helper; "" for microVMs.
func (u *updater) installed() string {
	u.t.Helper()
	if kind, _ := pick.Choose(pick.Auto); kind != pick.GVisor {
		return ""
	}
	b, err := os.ReadFile(filepath.Join(u.State, "programs-"+u.now, string(assets.GVisorHelper)))
	if err != nil {
		u.t.Fatal(err)
	}
	return layer.Digest(sha256.Sum256(b)).String()
}

// drop kills the sandboxes and deletes the checkpoints.
func (u *updater) drop() {
	u.t.Helper()
	for _, name := range slices.Concat(u.running, u.hibernated) {
		if _, err := u.Client.Kill(u.t.Context(), name); err != nil {
			u.t.Error(err)
		}
	}
	for _, name := range u.saved {
		if err := u.Client.DeleteCheckpoint(u.t.Context(), name); err != nil {
			u.t.Error(err)
		}
	}
}

// onlyInstalled waits until all unused helpers are deleted.
func (u *updater) onlyInstalled() {
	u.t.Helper()
	want := u.installed()
	if want == "" {
		return
	}
	u.until("one helper is kept", func() error {
		list, err := u.entries("helpers")
		if err != nil || len(list) != 1 || !strings.HasSuffix(list[0], "-"+want) {
			return errors.Join(fmt.Errorf("there are %v", list), err)
		}
		return nil
	})
}

// until waits for a condition for which the API has no event.
func (u *updater) until(what string, is func() error) {
	u.t.Helper()
	const patience = 10 * time.Minute // an emulated machine builds a template in minutes
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := is()
		if err == nil {
			return
		}
		if time.Since(begin) > patience || u.t.Failed() {
			u.t.Fatalf("it never came to pass that %s: %v", what, err)
		}
	}
}
