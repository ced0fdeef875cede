package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// watcher writes down what it is told.
type watcher struct {
	mu   sync.Mutex // protects all following fields
	said []string
	at   uint64        // the version to continue from
	gate chan struct{} // each waits for it, if there is one
}

// describe is an event in words.
func describe(e sandbox.Event) string {
	switch e.Kind {
	case sandbox.KindSandbox:
		return fmt.Sprintf("%s %s/%s %s", e.Type, e.Sandbox.Namespace, e.Sandbox.Name, e.Sandbox.State)
	case sandbox.KindTemplate:
		return fmt.Sprintf("%s template %s", e.Type, e.Template.Name)
	case sandbox.KindPool:
		return fmt.Sprintf("%s pool %s", e.Type, e.Pool.Name)
	case sandbox.KindFork:
		return fmt.Sprintf("%s fork %s %s", e.Type, e.Fork.Name, e.Fork.Phase)
	case sandbox.KindCheckpoint:
		return fmt.Sprintf("%s checkpoint %s", e.Type, e.Checkpoint.Name)
	}
	return strings.TrimSpace(string(e.Type) + " " + string(e.Kind))
}

func (w *watcher) each(e sandbox.Event) error {
	if w.gate != nil {
		<-w.gate
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said, w.at = append(w.said, describe(e)), e.ResourceVersion
	return nil
}

// where is the version to continue from, while the watch runs.
func (w *watcher) where() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.at
}

// take returns the events since its last call.
func (w *watcher) take() (said []string) {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	said, w.said = w.said, nil
	return said
}

func (w *watcher) wants(t *testing.T, want ...string) {
	t.Helper()
	if said := w.take(); !slices.Equal(said, want) {
		t.Errorf("told %q, not %q", said, want)
	}
}

// onSandboxes asks for sandboxes alone.
func onSandboxes(n sandbox.Namespace, from uint64) sandbox.WatchRequest {
	return sandbox.WatchRequest{Namespace: n, Kinds: []sandbox.Kind{sandbox.KindSandbox}, From: from}
}

// start watches until the test ends or stop is called, which returns the error.
func (w *watcher) start(t *testing.T, m *Manager, r sandbox.WatchRequest) (stop func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Watch(ctx, r, w.each) }()
	synctest.Wait()
	return func() error { cancel(); return <-ended }
}

// works ends the test with the error of a call.
func works(t *testing.T) func(sandbox.Sandbox, error) sandbox.Sandbox {
	return func(s sandbox.Sandbox, err error) sandbox.Sandbox {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

// TestWatch: watchers get all objects, a sign that these were all, and then each
// change, in one namespace or in all. A slow watcher delays no one.
func TestWatch(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		claim(t, m, "gone", sandbox.Lifetime{})
		works(t)(m.Kill(t.Context(), key("gone")))
		own, every, other, slow := &watcher{}, &watcher{}, &watcher{}, &watcher{gate: make(chan struct{})}
		stops := []func() error{
			own.start(t, m, onSandboxes(sandbox.DefaultNamespace, 0)), every.start(t, m, onSandboxes("", 0)),
			other.start(t, m, onSandboxes("other", 0)), slow.start(t, m, onSandboxes("", 0)),
		}
		own.wants(t, "object default/a Running", "synced")
		every.wants(t, "object default/a Running", "synced")
		other.wants(t, "synced")
		claim(t, m, "b", sandbox.Lifetime{})
		own.wants(t, "object default/b Running")
		paused := works(t)(m.Pause(t.Context(), key("a")))
		own.wants(t, "object default/a Paused")
		if own.at != paused.ResourceVersion {
			t.Errorf("told at %d what was written at %d", own.at, paused.ResourceVersion)
		}
		works(t)(m.Kill(t.Context(), key("b")))
		own.wants(t, "deleted default/b Ended")
		every.wants(t, "object default/b Running", "object default/a Paused", "deleted default/b Ended")
		other.wants(t)
		close(slow.gate)
		slow.wants(t, "object default/a Running", "synced", "object default/b Running", "object default/a Paused", "deleted default/b Ended")
		for _, stop := range stops {
			if err := stop(); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		if m.watchers.all != 0 || len(m.watchers.by) != 0 {
			t.Errorf("%d watches are left", m.watchers.all)
		}
		failed := errors.New("gone")
		if err := m.Watch(t.Context(), onSandboxes("", 0), func(sandbox.Event) error { return failed }); !errors.Is(err, failed) {
			t.Error(err)
		}
		closing := make(chan error, 1)
		go func() { closing <- m.Watch(context.Background(), onSandboxes("", 0), every.each) }()
		synctest.Wait()
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-closing; !sandbox.HasCode(err, sandbox.CodeClosing) {
			t.Errorf("when the daemon goes: %v", err)
		}
	})
}

// TestWatchKinds: all kinds of objects are watched, including those that are
// composed of several. Deletions are sent with the last state of the object.
func TestWatchKinds(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		ctx := t.Context()
		claim(t, m, "a", sandbox.Lifetime{})
		time.Sleep(time.Minute) // the node's status is written
		all := &watcher{}
		all.start(t, m, sandbox.WatchRequest{})
		first := all.take()
		for _, want := range []string{"object node", "object template python", "object pool pool", "object default/a Running"} {
			if !slices.Contains(first, want) {
				t.Errorf("%q is not in %q", want, first)
			}
		}
		if len(first) != 5 || first[4] != "synced" {
			t.Errorf("told %q", first)
		}
		told := func(want ...string) {
			t.Helper()
			time.Sleep(time.Second) // for writes that are grouped
			said := all.take()
			for _, w := range want {
				if !slices.Contains(said, w) {
					t.Errorf("%q is not in %q", w, said)
				}
			}
		}
		if _, _, err := m.Fork(ctx, sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}}); err != nil {
			t.Fatal(err)
		}
		told("object fork f Pending", "object default/f-1 Running", "object fork f Ready", "object node")
		if _, _, err := m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("c"), Source: "a"}); err != nil {
			t.Fatal(err)
		}
		told("object checkpoint c")
		if _, err := m.ApplyPool(ctx, key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 2}); err != nil {
			t.Fatal(err)
		}
		told("object pool pool", "object node")
		if _, err := m.ApplyTemplate(ctx, key("other"), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
			t.Fatal(err)
		}
		told("object template other")
		for _, del := range []func() error{
			func() error { return m.DeleteTemplate(ctx, key("other")) }, func() error { return m.DeleteFork(ctx, key("f")) },
			func() error { return m.DeleteCheckpoint(ctx, key("c")) }, func() error { return m.DeletePool(ctx, key("pool")) },
		} {
			if err := del(); err != nil {
				t.Fatal(err)
			}
		}
		told("deleted template other", "deleted fork f Ready", "deleted default/f-1 Ended", "deleted checkpoint c", "deleted pool pool")
	})
}

// TestWatchPool: changes of a pool's status are sent, and at most once per interval, even
// if it changes more often.
func TestWatchPool(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		var ready []int
		var mu sync.Mutex
		go func() {
			_ = m.Watch(t.Context(), sandbox.WatchRequest{Kinds: []sandbox.Kind{sandbox.KindPool}}, func(e sandbox.Event) error {
				mu.Lock()
				defer mu.Unlock()
				if e.Pool != nil {
					ready = append(ready, e.PoolStatus.Ready)
				}
				return nil
			})
		}()
		take := func() (out []int) {
			time.Sleep(time.Second)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			out, ready = ready, nil
			return out
		}
		take()
		if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 40}); err != nil {
			t.Fatal(err)
		}
		// One for the pool, and one for each time at which what it has is written.
		if got := take(); len(got) < 2 || len(got) > 7 || got[len(got)-1] != 40 {
			t.Errorf("told of %v ready sandboxes", got)
		}
		p, status, err := m.Pool(t.Context(), key("pool"))
		now, _ := m.Version(t.Context())
		if err != nil || status.Ready != 40 || p.ResourceVersion == 0 || p.ResourceVersion > now.Version {
			t.Errorf("%+v has %+v at %d, %v", p, status, now.Version, err)
		}
	})
}

// TestWatchResumes: a watch goes on after any event of another, over a restart of the
// daemon too if it has missed nothing; otherwise it is refused as too old.
func TestWatchResumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h)
		setUp(t, m, 0)
		w := &watcher{}
		stop := w.start(t, m, onSandboxes("", 0))
		claim(t, m, "a", sandbox.Lifetime{})
		w.wants(t, "synced", "object default/a Running")
		at := w.at
		_ = stop()
		works(t)(m.Pause(t.Context(), key("a")))
		claim(t, m, "b", sandbox.Lifetime{})
		works(t)(m.Kill(t.Context(), key("b")))
		stop = w.start(t, m, onSandboxes("", at))
		w.wants(t, "bookmark", "object default/a Paused", "object default/b Running", "deleted default/b Ended")
		_ = stop()
		stop = w.start(t, m, onSandboxes("", w.at))
		w.wants(t, "bookmark")
		time.Sleep(time.Minute) // the node's record was written by now: it has gone further
		_ = stop()
		w.take()
		now, err := m.Version(t.Context())
		if err != nil || w.at != now.Version {
			t.Errorf("after bookmarks it is at %d, the node at %+v, %v", w.at, now, err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		defer func() { _ = m.Close() }()
		if again, _ := m.Version(t.Context()); again.ID != now.ID || again.Version < now.Version {
			t.Errorf("after a restart the node is at %+v, was at %+v", again, now)
		}
		stop = w.start(t, m, sandbox.WatchRequest{Kinds: []sandbox.Kind{sandbox.KindSandbox}, From: w.at, State: now.ID})
		works(t)(m.Resume(t.Context(), key("a")))
		w.wants(t, "bookmark", "object default/a Running")
		_ = stop()
		refused := func(what string, r sandbox.WatchRequest, code sandbox.Code) {
			t.Helper()
			if err := m.Watch(t.Context(), r, w.each); !sandbox.HasCode(err, code) {
				t.Errorf("%s: %v, not %s", what, err, code)
			}
		}
		refused("before the restart", onSandboxes("", at), sandbox.CodeTooOld)
		refused("the future", onSandboxes("", now.Version+1000), sandbox.CodeOtherState)
		refused("another state folder", sandbox.WatchRequest{From: w.at, State: "OTHER"}, sandbox.CodeOtherState)
		refused("secrets", sandbox.WatchRequest{Kinds: []sandbox.Kind{sandbox.KindSecret}}, sandbox.CodeInvalid)
		w.wants(t)
	})
}

// TestWatchIsNeverSilent: a watch without changes gets bookmarks from time to time.
func TestWatchIsNeverSilent(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		time.Sleep(time.Hour) // no further write follows
		w := &watcher{}
		defer w.start(t, m, onSandboxes("", 0))()
		w.wants(t, "synced")
		at := w.where()
		time.Sleep(6*bookmarkEvery + time.Second)
		if said := w.take(); len(said) < 5 || len(said) > 6 || slices.Index(said, "bookmark") != 0 || w.where() != at {
			t.Errorf("it was told %q, and is at %d, not %d", said, w.where(), at)
		}
		for range 20 {
			claim(t, m, string(sandbox.NewName("x")), sandbox.Lifetime{})
			time.Sleep(bookmarkEvery / 2)
		}
		if said := w.take(); len(said) != 20 || slices.Contains(said, "bookmark") {
			t.Errorf("of 20 claims it was told %q", said)
		}
	})
}

// TestWatchesTakeTurns: so many watches at once read all that there is; the next one waits.
func TestWatchesTakeTurns(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		for range watchesBegin {
			m.watchesBegin <- struct{}{}
		}
		w := &watcher{}
		stop := w.start(t, m, onSandboxes("", 0))
		w.wants(t)
		<-m.watchesBegin
		w.wants(t, "synced")
		_ = stop()
		if len(m.watchesBegin) != watchesBegin-1 {
			t.Error("it has not given its turn back")
		}
	})
}

// TestWatchesAreBounded: of one principal, of single namespaces, and of all together.
func TestWatchesAreBounded(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		in := func(n sandbox.Namespace, who string) error {
			ctx, cancel := context.WithCancel(sandbox.WithPrincipal(t.Context(), sandbox.Principal(who)))
			ended := make(chan error, 1)
			go func() { ended <- m.Watch(ctx, onSandboxes(n, 0), func(sandbox.Event) error { return nil }) }()
			synctest.Wait()
			select {
			case err := <-ended:
				cancel()
				return err
			default:
				t.Cleanup(cancel)
				return nil
			}
		}
		as := func(who string) error { return in("", who) }
		for range maxWatches {
			if err := as("greedy"); err != nil {
				t.Fatal(err)
			}
		}
		if err := as("greedy"); !sandbox.HasCode(err, sandbox.CodeCapacity) {
			t.Errorf("one more: %v", err)
		}
		if err := as("modest"); err != nil {
			t.Errorf("another principal: %v", err)
		}
		m.watchers.mu.Lock()
		m.watchers.spaces = maxSpaceWatches
		m.watchers.mu.Unlock()
		if err := in("default", "tenant"); !sandbox.HasCode(err, sandbox.CodeCapacity) {
			t.Errorf("more than tenants may have: %v", err)
		}
		if err := as("controller"); err != nil {
			t.Errorf("a watch of all beside those of tenants: %v", err)
		}
		m.watchers.mu.Lock()
		m.watchers.all = maxAllWatches
		m.watchers.mu.Unlock()
		if err := as("late"); !sandbox.HasCode(err, sandbox.CodeCapacity) {
			t.Errorf("more than all may have: %v", err)
		}
	})
}

// TestChangesAreBounded: the number and the bytes of the kept changes are bounded. A
// watch that needs earlier ones gets an error.
func TestChangesAreBounded(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		claim(t, m, "a", sandbox.Lifetime{})
		kept := func() (count, bytes int, floor uint64) {
			m.changes.mu.Lock()
			defer m.changes.mu.Unlock()
			for _, c := range m.changes.all {
				bytes += c.size
			}
			if bytes != m.changes.bytes {
				t.Errorf("%d bytes are counted as %d", bytes, m.changes.bytes)
			}
			return len(m.changes.all), bytes, m.changes.floor
		}
		bound := func(count, bytes int) {
			m.changes.mu.Lock()
			defer m.changes.mu.Unlock()
			m.changes.keep, m.changes.keepBytes = count, bytes
		}
		churn := func() {
			for range 20 {
				works(t)(m.Pause(t.Context(), key("a")))
				works(t)(m.Resume(t.Context(), key("a")))
			}
		}
		w := &watcher{gate: make(chan struct{})}
		stalled := make(chan error, 1)
		go func() { stalled <- m.Watch(t.Context(), onSandboxes("", 0), w.each) }()
		synctest.Wait()
		bound(10, 1<<20)
		churn()
		count, bytes, floor := kept()
		if count != 10 {
			t.Errorf("%d changes are kept", count)
		}
		bound(1000, bytes/2)
		churn()
		if count, now, later := kept(); count == 0 || now > bytes/2 || later <= floor {
			t.Errorf("%d changes of %d bytes are kept, after %d", count, now, later)
		}
		close(w.gate)
		if err := <-stalled; !sandbox.HasCode(err, sandbox.CodeTooOld) {
			t.Errorf("a watch that was stalled: %v", err)
		}
		now, _ := m.Version(t.Context())
		if err := m.Watch(t.Context(), onSandboxes("", floor), w.each); !sandbox.HasCode(err, sandbox.CodeTooOld) {
			t.Errorf("from before what is kept: %v", err)
		}
		next := &watcher{}
		stop := next.start(t, m, onSandboxes("", now.Version))
		next.wants(t, "bookmark")
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("from now: %v", err)
		}
	})
}

// TestListsOfAll: lists of all namespaces go through them in pages, in one order.
func TestListsOfAll(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		var want []string
		for _, n := range []sandbox.Namespace{"a", "a-b", "b"} {
			setUpIn(t, m, n)
			for _, name := range []sandbox.Name{"x", "y", "z"} {
				k := sandbox.Key{Namespace: n, Name: name}
				if _, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: k, Spec: sandbox.ClaimSpec{Pool: "pool"}}); err != nil {
					t.Fatal(err)
				}
				want = append(want, k.String())
			}
		}
		slices.Sort(want)
		for _, limit := range []int{1, 2, 4, 100} {
			var got []string
			for after := ""; ; {
				page, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Page: sandbox.Page{After: after, Limit: limit}})
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range page {
					got, after = append(got, s.Key.String()), string(s.Namespace)+"/"+s.Position()
				}
				if len(page) < limit {
					break
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("in pages of %d: %v, want %v", limit, got, want)
			}
		}
		pools, err := m.Pools(t.Context(), "", sandbox.Page{After: "a-b/pool"})
		if err != nil || len(pools) != 3 || pools[0].Namespace != "a" || pools[0].ResourceVersion == 0 {
			t.Errorf("%+v, %v", pools, err)
		}
		if _, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Ended: true}); !sandbox.HasCode(err, sandbox.CodeInvalid) {
			t.Errorf("ended ones of all: %v", err)
		}
	})
}

// setUpIn makes a template and an empty pool of it in a namespace.
func setUpIn(t *testing.T, m *Manager, n sandbox.Namespace) {
	t.Helper()
	_, err := m.ApplyTemplate(t.Context(), sandbox.Key{Namespace: n, Name: "python"}, sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib})
	if err == nil {
		_, err = m.ApplyPool(t.Context(), sandbox.Key{Namespace: n, Name: "pool"}, sandbox.PoolSpec{Template: "python"})
	}
	if err == nil {
		err = m.WaitPool(t.Context(), sandbox.Key{Namespace: n, Name: "pool"})
	}
	if err != nil {
		t.Fatal(err)
	}
}
