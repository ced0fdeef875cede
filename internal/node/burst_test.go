package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// slowHost is a host on which starts of machines, and rehearsals of those that are
// going to wait, end when the test says so, once it is closed.
type slowHost struct {
	*nodetest.Host

	mu     sync.Mutex // protects all following fields
	closed bool       // nothing ends by itself
	doing  []*start   // in the order in which they began
	most   int        // how many there were at once
}

// start is a start of a machine, or a rehearsal.
type start struct {
	what string // the host name; refill and rehearsal are those of a pool
	end  chan error
}

const refill, rehearsal = "refill", "rehearsal"

func (h *slowHost) begin(ctx context.Context, what string) error {
	h.mu.Lock()
	if !h.closed {
		h.mu.Unlock()
		return nil
	}
	s := &start{what: what, end: make(chan error, 1)}
	h.doing = append(h.doing, s)
	h.most = max(h.most, len(h.doing))
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.doing = slices.DeleteFunc(h.doing, func(other *start) bool { return other == s })
	}()
	select {
	case err := <-s.end:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// close makes starts wait for the test from now on.
func (h *slowHost) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
}

// open ends the waiting calls, and lets later ones end at once.
func (h *slowHost) open() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = false
	for _, s := range h.doing {
		s.end <- nil
	}
}

// now waits until all that can happen has happened, and says what is being started.
func (h *slowHost) now() (names []string) {
	synctest.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.doing {
		names = append(names, s.what)
	}
	return names
}

// finish ends the start that began first.
func (h *slowHost) finish(t *testing.T, want string, err error) {
	t.Helper()
	synctest.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.doing) == 0 || h.doing[0].what != want {
		t.Fatalf("the first of %d starts is not %s: %+v", len(h.doing), want, h.doing)
	}
	h.doing[0].end <- err
}

func (h *slowHost) want(t *testing.T, want ...string) {
	t.Helper()
	if got := h.now(); !slices.Equal(got, want) {
		t.Fatalf("being started: %v, want %v", got, want)
	}
}

func (h *slowHost) Fork(ctx context.Context, snap *snapshot.Snapshot, o engine.ForkOptions) (engine.Sandbox, error) {
	what := o.Hostname
	if what == "" {
		what = refill
	}
	if err := h.begin(ctx, what); err != nil {
		return nil, err
	}
	root, err := snap.ReadLayer(snap.Manifest().Disks[0].Stack.Layer().Layers[0])
	if err != nil {
		return nil, err
	}
	if err := root.Close(); err != nil {
		return nil, err
	}
	sb, err := h.Host.Fork(ctx, snap, o)
	if err != nil {
		return nil, err
	}
	return &slowSandbox{sb, h}, nil
}

type slowSandbox struct {
	engine.Sandbox
	host *slowHost
}

func (s *slowSandbox) Claim(ctx context.Context, hostname string) error {
	if hostname == "" {
		if err := s.host.begin(ctx, rehearsal); err != nil {
			return err
		}
	}
	return s.Sandbox.Claim(ctx, hostname)
}

func (s *slowSandbox) Fork(ctx context.Context, opts []engine.ForkOptions) (*engine.LiveFork, error) {
	live := &engine.LiveFork{Forks: make([]engine.Sandbox, len(opts)), Errs: make([]error, len(opts))}
	var all sync.WaitGroup
	for i, o := range opts {
		all.Go(func() {
			done, err := o.WaitTurn(ctx)
			if err != nil {
				live.Errs[i] = err
				return
			}
			defer done()
			if live.Errs[i] = s.host.begin(ctx, o.Hostname); live.Errs[i] != nil {
				return
			}
			o.Turn = nil // it is held
			one, err := s.Sandbox.Fork(ctx, []engine.ForkOptions{o})
			if err != nil {
				live.Errs[i] = err
				return
			}
			live.Forks[i], live.Errs[i] = one.Forks[0], one.Errs[0]
		})
	}
	all.Wait()
	return live, nil
}

// answer is the result of a call that was running.
type answer struct {
	name string
	done chan struct{}
	err  error
}

// claims begins a claim, which has arrived when this returns.
func (h *slowHost) claims(ctx context.Context, m *Manager, k sandbox.Key) *answer {
	return h.calls(string(k.Name), func() error {
		_, _, err := m.Claim(ctx, sandbox.ClaimRequest{Key: k, Spec: sandbox.ClaimSpec{Pool: "pool"}})
		return err
	})
}

func (h *slowHost) calls(name string, call func() error) *answer {
	a := &answer{name: name, done: make(chan struct{})}
	go func() {
		defer close(a.done)
		a.err = call()
	}()
	synctest.Wait()
	return a
}

func (a *answer) want(t *testing.T, good bool) {
	t.Helper()
	<-a.done
	if good != (a.err == nil) {
		t.Errorf("%s: %v", a.name, a.err)
	}
}

// waits fails if the call has returned.
func (a *answer) waits(t *testing.T) {
	t.Helper()
	synctest.Wait()
	select {
	case <-a.done:
		t.Fatalf("%s does not wait: %v", a.name, a.err)
	default:
	}
}

// burst runs a test with a manager that starts so many machines at once, and a full
// pool of so many sandboxes.
func burst(t *testing.T, starts, ready int, run func(*testing.T, *Manager, *slowHost), change ...func(*Config)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &slowHost{Host: nodetest.NewHost(t)}
		change = append(change, func(c *Config) {
			c.Engine = h
			c.Starts = starts
		})
		m := daemon(t, t.TempDir(), h.Host, change...)
		defer func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}()
		defer h.open()
		setUp(t, m, ready)
		h.close()
		run(t, m, h)
	})
}

// TestBurstIsBounded: of a hundred claims at once some take waiting machines, and at
// most a few forks are made at once for the others. All are answered.
func TestBurstIsBounded(t *testing.T) {
	const starts, ready, all = 3, 10, 100
	burst(t, starts, ready, func(t *testing.T, m *Manager, h *slowHost) {
		var claims []*answer
		for i := range all {
			claims = append(claims, h.claims(t.Context(), m, key(fmt.Sprintf("c-%d", i))))
		}
		h.finish(t, refill, nil) // it began when the first claim had been answered
		for i := ready; i < all; i++ {
			var want []string // in order of arrival
			for j := i; j < min(i+starts, all); j++ {
				want = append(want, fmt.Sprintf("c-%d", j))
			}
			if len(want) < starts { // no claim waits any more
				want = append(want[:len(want):len(want)], rehearsal)
			}
			if got := h.now(); !slices.Equal(got[:min(len(got), len(want))], want) || len(got) > starts {
				t.Fatalf("being started: %v, want %v", got, want)
			}
			h.finish(t, fmt.Sprintf("c-%d", i), nil)
		}
		for _, c := range claims {
			c.want(t, true)
		}
		h.open()
		synctest.Wait()
		if h.most > starts {
			t.Errorf("%d machines were started at once, not %d at most", h.most, starts)
		}
		if _, st, err := m.Pool(t.Context(), key("pool")); err != nil || st.Ready != ready {
			t.Errorf("the pool is not full again: %+v, %v", st, err)
		}
	})
}

// TestTurnsOfNamespaces: a namespace with many claims delays the one of another by one
// start.
func TestTurnsOfNamespaces(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		other := sandbox.Key{Namespace: "other", Name: "pool"}
		if _, err := m.ApplyTemplate(t.Context(), sandbox.Key{Namespace: "other", Name: "python"}, sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.ApplyPool(t.Context(), other, sandbox.PoolSpec{Template: "python"}); err != nil {
			t.Fatal(err)
		}
		if err := m.WaitPool(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		var all []*answer
		for _, k := range []sandbox.Key{key("a-1"), key("a-2"), key("a-3"), key("a-4"), {Namespace: "other", Name: "b-1"}, {Namespace: "other", Name: "b-2"}} {
			all = append(all, h.claims(t.Context(), m, k))
		}
		for _, name := range []string{"a-1", "a-2", "b-1", "a-3", "b-2", "a-4"} {
			h.want(t, name)
			h.finish(t, name, nil)
		}
		for _, c := range all {
			c.want(t, true)
		}
	})
}

// TestRefillGivesWay: a pool is not filled while claims wait for a turn, and one that is
// being filled lets a claim go first after each step; it is full in the end.
func TestRefillGivesWay(t *testing.T) {
	burst(t, 1, 2, func(t *testing.T, m *Manager, h *slowHost) {
		h.claims(t.Context(), m, key("ready-1")).want(t, true)
		h.want(t, refill)
		h.claims(t.Context(), m, key("ready-2")).want(t, true) // needs no turn
		first, second := h.claims(t.Context(), m, key("c-1")), h.claims(t.Context(), m, key("c-2"))
		h.finish(t, refill, nil)
		h.want(t, "c-1")
		h.finish(t, "c-1", nil)
		first.want(t, true)
		h.want(t, "c-2")
		h.finish(t, "c-2", nil)
		second.want(t, true)
		// No claim waits, so the pool continues where it was.
		h.finish(t, rehearsal, nil)
		h.want(t, rehearsal)
		third := h.claims(t.Context(), m, key("c-3"))
		third.waits(t)
		h.finish(t, rehearsal, nil)
		h.want(t, "c-3")
		h.finish(t, "c-3", nil)
		third.want(t, true)
		h.want(t, rehearsal)
		h.open()
		synctest.Wait()
		if _, st, err := m.Pool(t.Context(), key("pool")); err != nil || st.Ready != 2 {
			t.Errorf("the pool is not full again: %+v, %v", st, err)
		}
	})
}

// TestRefillBesideClaims: a claim that is being served keeps a pool from being filled as
// little as a pool keeps a claim waiting, where there is a turn for each.
func TestRefillBesideClaims(t *testing.T) {
	burst(t, 2, 1, func(t *testing.T, m *Manager, h *slowHost) {
		h.claims(t.Context(), m, key("ready")).want(t, true)
		h.want(t, refill)
		c := h.claims(t.Context(), m, key("c-1"))
		h.want(t, refill, "c-1")
		h.finish(t, refill, nil)
		h.want(t, "c-1", rehearsal)
		h.finish(t, "c-1", nil)
		c.want(t, true)
		// The turn that is left is not for another pool: the next claim has it.
		if _, err := m.ApplyPool(t.Context(), key("second"), sandbox.PoolSpec{Template: "python", Replicas: 1}); err != nil {
			t.Fatal(err)
		}
		h.want(t, rehearsal)
		c = h.claims(t.Context(), m, key("c-2"))
		h.want(t, rehearsal, "c-2")
		h.open()
		c.want(t, true)
	})
}

// TestRefillHasNoMemoryYet: a pool that waits for its turn does not hold memory that a
// claim needs.
func TestRefillHasNoMemoryYet(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		first := h.claims(t.Context(), m, key("c-1"))
		if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 1}); err != nil {
			t.Fatal(err)
		}
		second := h.claims(t.Context(), m, key("c-2"))
		third := h.claims(t.Context(), m, key("c-3"))
		third.want(t, false) // there is memory for two, and it is told so at once
		if !sandbox.HasCode(third.err, sandbox.CodeCapacity) {
			t.Error(third.err)
		}
		h.finish(t, "c-1", nil)
		h.finish(t, "c-2", nil)
		first.want(t, true)
		second.want(t, true)
	}, func(c *Config) { c.Capacity = 128 * mib })
}

// TestWaitingClaimIsCancelled: a claim whose caller leaves leaves the queue, and
// nothing of it is left.
func TestWaitingClaimIsCancelled(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		first := h.claims(t.Context(), m, key("c-1"))
		before := m.capacity.reserved()
		ctx, cancel := context.WithCancel(t.Context())
		second := h.claims(ctx, m, key("c-2"))
		third := h.claims(t.Context(), m, key("c-3"))
		second.waits(t)
		h.want(t, "c-1")
		cancel()
		second.want(t, false)
		if !errors.Is(second.err, context.Canceled) {
			t.Error(second.err)
		}
		if _, err := m.Sandbox(ctx, key("c-2")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("it is there: %v", err)
		}
		if got := m.capacity.reserved(); got != before+64*mib {
			t.Errorf("%d bytes are reserved for one that waits, not %d", got-before, 64*mib)
		}
		h.finish(t, "c-1", nil)
		h.want(t, "c-3")
		h.finish(t, "c-3", nil)
		first.want(t, true)
		third.want(t, true)
	})
}

// TestFailedStartGivesItsTurnBack: the next claim has it.
func TestFailedStartGivesItsTurnBack(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		first, second := h.claims(t.Context(), m, key("c-1")), h.claims(t.Context(), m, key("c-2"))
		h.want(t, "c-1")
		h.finish(t, "c-1", errors.New("no"))
		first.want(t, false)
		h.want(t, "c-2")
		h.finish(t, "c-2", nil)
		second.want(t, true)
	})
}

// TestCloseEndsWaitingClaims: they are told that the daemon is shutting down, and so
// are calls that wake a sandbox up.
func TestCloseEndsWaitingClaims(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		h.open()
		h.claims(t.Context(), m, key("asleep")).want(t, true)
		if _, err := m.Hibernate(t.Context(), key("asleep")); err != nil {
			t.Fatal(err)
		}
		h.close()
		claims := []*answer{h.claims(t.Context(), m, key("c-1")), h.claims(t.Context(), m, key("c-2"))}
		wake := h.calls("wake", func() error { _, err := m.Resume(t.Context(), key("asleep")); return err })
		h.want(t, "c-1")
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		for _, c := range claims {
			c.want(t, false)
			if e := (*sandbox.Error)(nil); !errors.As(c.err, &e) || e.Code != sandbox.CodeClosing || c.err.Error() != e.Error() {
				t.Errorf("%s: %v", c.name, c.err)
			}
		}
		if wake.want(t, false); !sandbox.HasCode(wake.err, sandbox.CodeClosing) {
			t.Error(wake.err)
		}
	})
}

// TestDeletedPoolEndsWaitingClaims: they are told that it is gone, whether their machine
// is being started or not.
func TestDeletedPoolEndsWaitingClaims(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		claims := []*answer{h.claims(t.Context(), m, key("c-1")), h.claims(t.Context(), m, key("c-2"))}
		h.want(t, "c-1")
		if err := m.DeletePool(t.Context(), key("pool")); err != nil {
			t.Error(err)
		}
		for _, c := range claims {
			c.want(t, false)
			if !sandbox.HasCode(c.err, sandbox.CodeNotFound) {
				t.Errorf("%s: %v", c.name, c.err)
			}
		}
		if n := m.capacity.reserved(); n != 0 {
			t.Errorf("%d bytes are still reserved", n)
		}
	})
}

// TestClaimsOutliveTheirRevision: claims that wait are served from the snapshot that they
// came for, which is deleted when none needs it any more.
func TestClaimsOutliveTheirRevision(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		first, second := h.claims(t.Context(), m, key("c-1")), h.claims(t.Context(), m, key("c-2"))
		if _, err := m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: "two", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
			t.Fatal(err)
		}
		h.finish(t, "c-1", nil)
		first.want(t, true)
		third := h.claims(t.Context(), m, key("c-3"))
		h.finish(t, "c-2", nil)
		second.want(t, true)
		h.finish(t, "c-3", nil)
		third.want(t, true)
		for name, image := range map[string]string{"c-1": "one", "c-2": "one", "c-3": "two"} {
			if got := memory(t, h.Host, m, name)["image"]; got != image {
				t.Errorf("%s is of image %q, not %q", name, got, image)
			}
		}
		synctest.Wait()
		if left, err := os.ReadDir(filepath.Join(m.cfg.Dir, snapshotsDir)); err != nil || len(left) != 1 {
			t.Errorf("snapshots that are left: %v, %v", left, err)
		}
	})
}

// TestTurnsOfOthers: sandboxes that wake up or are restored wait for their turn, and so
// do children of a fork, one by one.
func TestTurnsOfOthers(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		ctx := t.Context()
		h.open()
		for _, name := range []string{"asleep", "source"} {
			h.claims(ctx, m, key(name)).want(t, true)
		}
		if _, _, err := m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: key("saved"), Source: "source"}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Hibernate(ctx, key("asleep")); err != nil {
			t.Fatal(err)
		}
		h.close()
		all := []*answer{
			h.claims(ctx, m, key("first")),
			h.calls("resume", func() error { _, err := m.Resume(ctx, key("asleep")); return err }),
			h.calls("restore", func() error {
				_, _, err := m.Restore(ctx, sandbox.RestoreRequest{Key: key("restored"), Checkpoint: "saved", Spec: sandbox.RestoreSpec{}})
				return err
			}),
			h.calls("fork", func() error {
				_, _, err := m.Fork(ctx, sandbox.ForkRequest{Key: key("child"), Spec: sandbox.ForkSpec{Source: "source", Replicas: 1}})
				return err
			}),
			h.calls("fork", func() error {
				_, _, err := m.Fork(ctx, sandbox.ForkRequest{Key: key("second"), Spec: sandbox.ForkSpec{Source: "source", Replicas: 1}})
				return err
			}),
			h.claims(ctx, m, key("last")),
		}
		for _, name := range []string{"first", "asleep", "restored", "child-1", "last", "second-1"} {
			h.want(t, name)
			h.finish(t, name, nil)
		}
		for _, a := range all {
			a.want(t, true)
		}
	})
}

// TestFinishNeedsNoTurn: the steps that a template's author has defined for each sandbox
// may take long, and delay no other call: neither in a claimed sandbox nor in one that
// will wait.
func TestFinishNeedsNoTurn(t *testing.T) {
	b := &slowBuilder{}
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		init := sandbox.Key{Namespace: "init", Name: "pool"}
		if _, err := m.ApplyTemplate(t.Context(), sandbox.Key{Namespace: "init", Name: "python"}, sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.ApplyPool(t.Context(), init, sandbox.PoolSpec{Template: "python", Stage: sandbox.AfterInit, Replicas: 1}); err != nil {
			t.Fatal(err)
		}
		if err := m.WaitPool(t.Context(), init); err != nil {
			t.Fatal(err)
		}
		h.finish(t, refill, nil)
		slow := h.claims(t.Context(), m, sandbox.Key{Namespace: "init", Name: "slow"})
		h.finish(t, "slow", nil)
		slow.waits(t)
		quick := h.claims(t.Context(), m, key("quick"))
		h.finish(t, "quick", nil)
		quick.want(t, true)
		h.open()
		close(b.finish)
		slow.want(t, true)
		synctest.Wait()
		if _, st, err := m.Pool(t.Context(), init); err != nil || st.Ready != 1 {
			t.Errorf("the pool is not full: %+v, %v", st, err)
		}
	}, func(c *Config) {
		b.finish = make(chan struct{}) // of this bubble
		c.Builder = b
	})
}

// slowBuilder is a builder whose Finish waits for the test.
type slowBuilder struct {
	builder
	finish chan struct{}
}

func (b *slowBuilder) Finish(ctx context.Context, _ sandbox.TemplateSpec, _ sandbox.Built, _ engine.Sandbox) error {
	select {
	case <-b.finish:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestTurnEnds: a machine that never starts has its turn for a while only: whoever asked for
// it goes on waiting, and others do not.
func TestTurnEnds(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		stuck := h.claims(t.Context(), m, key("stuck"))
		h.want(t, "stuck")
		begun := time.Now()
		other := h.claims(t.Context(), m, key("other"))
		other.waits(t)
		time.Sleep(longestStart)
		h.want(t, "stuck", "other")
		if waited := time.Since(begun); waited != longestStart {
			t.Errorf("it took %v", waited)
		}
		stuck.waits(t)
		// A late end gives back no second turn.
		h.finish(t, "stuck", nil)
		stuck.want(t, true)
		third := h.claims(t.Context(), m, key("third"))
		h.want(t, "other")
		h.finish(t, "other", nil)
		other.want(t, true)
		h.finish(t, "third", nil)
		third.want(t, true)
	})
}

// TestLateStarts: of the starts of a namespace that take too long so many go on beside others
// and no more, and others start beside them.
func TestLateStarts(t *testing.T) {
	burst(t, 1, 0, func(t *testing.T, m *Manager, h *slowHost) {
		quiet := sandbox.Key{Namespace: "quiet", Name: "pool"}
		if _, err := m.ApplyTemplate(t.Context(), sandbox.Key{Namespace: "quiet", Name: "python"}, sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
			t.Fatal(err)
		}
		must(t, second(m.ApplyPool(t.Context(), quiet, sandbox.PoolSpec{Template: "python"})))
		must(t, m.WaitPool(t.Context(), quiet))
		var stuck []*answer
		for i := range mostLate + 3 {
			stuck = append(stuck, h.claims(t.Context(), m, key(fmt.Sprintf("stuck-%02d", i))))
		}
		time.Sleep(2 * mostLate * longestStart)
		if n := len(h.now()); n != mostLate {
			t.Errorf("%d go on at once, want %d", n, mostLate)
		}
		other := h.claims(t.Context(), m, sandbox.Key{Namespace: "quiet", Name: "other"})
		if now := h.now(); now[len(now)-1] != "other" {
			t.Errorf("another namespace's does not start: %v", now)
		}
		h.finish(t, "stuck-00", nil)
		if now := h.now(); len(now) != mostLate || now[len(now)-1] != "other" {
			t.Errorf("the only turn is the other's: %v", now)
		}
		h.open()
		for _, a := range append(stuck, other) {
			a.want(t, true)
		}
	})
}
