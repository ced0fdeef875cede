package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/test/soak"
)

// written is a change of a sandbox that somebody was told was made.
type written struct {
	id        sandbox.ID
	namespace sandbox.Namespace
	state     sandbox.State
}

// truth is the model's knowledge: the changes of all sandboxes.
type truth struct {
	mu  sync.Mutex // protects all
	all map[uint64]written
}

func (tr *truth) note(s sandbox.Sandbox) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.all[s.ResourceVersion] = written{s.ID, s.Namespace, s.State}
}

// span has the events of a watcher between two resource versions, over any number
// of connections.
type span struct {
	from, to uint64
	told     map[uint64]written
}

// observer is somebody who keeps a picture of the sandboxes by watching, connects again and
// again, and begins anew when the node says that it has to.
type observer struct {
	name      string
	namespace sandbox.Namespace
	impatient bool // hangs up every now and then
	// stall, if it is not nil, delays the watcher in the middle of events until it is
	// closed.
	stall   chan struct{}
	picture map[sandbox.ID]sandbox.Sandbox
	spans   []span
	synced  bool
	tooOld  int
	errs    []string
	at      atomic.Uint64
}

var errHangUp = errors.New("hang up")

// follow watches the daemon that m has until ctx ends.
func (o *observer) follow(ctx context.Context, m func() *Manager) {
	o.picture = map[sandbox.ID]sandbox.Sandbox{}
	for ctx.Err() == nil {
		from := uint64(0)
		if o.synced {
			from = o.spans[len(o.spans)-1].to
		} else {
			clear(o.picture)
		}
		left := -1
		if o.impatient {
			left = 1 + rand.IntN(200)
		}
		err := m().Watch(ctx, onSandboxes(o.namespace, from), func(e sandbox.Event) error {
			o.take(e)
			if left--; left == 0 {
				return errHangUp
			}
			return nil
		})
		switch {
		case sandbox.HasCode(err, sandbox.CodeTooOld):
			o.tooOld++
			o.synced = false
		case sandbox.HasCode(err, sandbox.CodeOtherState):
			o.errs = append(o.errs, err.Error())
			o.synced = false
		}
		runtime.Gosched() // the daemon may be on its way
	}
}

// take checks an event and makes it a part of the picture.
func (o *observer) take(e sandbox.Event) {
	if o.stall != nil && o.synced && e.Type == sandbox.EventObject {
		<-o.stall
	}
	fail := func(format string, args ...any) { o.errs = append(o.errs, fmt.Sprintf(format, args...)) }
	if e.Type == sandbox.EventSynced {
		o.synced = true
		o.spans = append(o.spans, span{from: e.ResourceVersion, to: e.ResourceVersion, told: map[uint64]written{}})
		o.at.Store(e.ResourceVersion)
		return
	}
	if s := e.Sandbox; s != nil && o.namespace != "" && s.Namespace != o.namespace {
		fail("%s of %s was told", s.ID, s.Namespace)
	}
	if !o.synced {
		if _, double := o.picture[e.Sandbox.ID]; double || e.Type != sandbox.EventObject {
			fail("at the beginning: %+v", e)
		}
		o.picture[e.Sandbox.ID] = *e.Sandbox
		return
	}
	now := &o.spans[len(o.spans)-1]
	if e.ResourceVersion < now.to || e.ResourceVersion == now.to && e.Sandbox != nil {
		fail("%d comes after %d", e.ResourceVersion, now.to)
	}
	now.to = e.ResourceVersion
	if s := e.Sandbox; s != nil {
		if s.ResourceVersion != e.ResourceVersion {
			fail("an event of %d has %s as of %d", e.ResourceVersion, s.ID, s.ResourceVersion)
		}
		now.told[e.ResourceVersion] = written{s.ID, s.Namespace, s.State}
		if _, there := o.picture[s.ID]; e.Type == sandbox.EventDeleted && !there {
			fail("%s was deleted and never there", s.ID)
		}
		if o.picture[s.ID] = *s; e.Type == sandbox.EventDeleted {
			delete(o.picture, s.ID)
		}
	}
	o.at.Store(e.ResourceVersion)
}

// check compares the observer's events with the present and past sandboxes.
func (o *observer) check(t *testing.T, tr *truth, want map[sandbox.ID]sandbox.Sandbox) {
	t.Helper()
	for _, e := range o.errs {
		t.Errorf("%s: %s", o.name, e)
	}
	if !slices.Equal(slices.Sorted(maps.Keys(o.picture)), slices.Sorted(maps.Keys(want))) {
		t.Errorf("%s has a picture of %d sandboxes, there are %d", o.name, len(o.picture), len(want))
	}
	for id, s := range want {
		if got := o.picture[id]; got.ResourceVersion != s.ResourceVersion || got.State != s.State {
			t.Errorf("%s believes that %s is %s as of %d, it is %s as of %d", o.name, id, got.State, got.ResourceVersion, s.State, s.ResourceVersion)
		}
	}
	for version, w := range tr.all {
		for _, sp := range o.spans {
			in := version > sp.from && version <= sp.to && (o.namespace == "" || w.namespace == o.namespace)
			if got, told := sp.told[version]; in && (!told || got != w) {
				t.Errorf("%s was not told of %d: %+v, but of %+v", o.name, version, w, got)
			}
		}
	}
}

// TestWatchersHaveTheTruth: many watchers end up with the present sandboxes, and have got
// each change in between once. Some of them hang up all the time, and one stalls.
// Meanwhile sandboxes come and go, the daemon is killed, and the journal is compacted. The
// changes that are kept for the watchers stay bounded.
func TestWatchersHaveTheTruth(t *testing.T) {
	sandboxes, rounds := soak.Count(10000, 150), 3
	keep := sandboxes * 4 / 3 // fewer than a stalled watcher misses, more than a list takes
	spaces := []sandbox.Namespace{"a", "b", "c"}
	dir, host := t.TempDir(), nodetest.NewHost(t)
	var now atomic.Pointer[Manager]
	open := func() *Manager {
		m := daemon(t, dir, host, func(c *Config) { c.Commits = journal.Cost{NoSync: true} })
		m.changes.mu.Lock()
		m.changes.keep = keep
		m.changes.mu.Unlock()
		now.Store(m)
		return m
	}
	m := open()
	defer func() { _ = now.Load().Close() }()
	for _, n := range spaces {
		setUpIn(t, m, n)
	}
	tr := &truth{all: map[uint64]written{}}
	claimed := make([]sandbox.Key, sandboxes)
	for i := range claimed {
		claimed[i] = sandbox.Key{Namespace: spaces[i%len(spaces)], Name: sandbox.Name(fmt.Sprintf("s-%d", i))}
	}
	// each does something with all sandboxes, some at once.
	each := func(do func(m *Manager, k sandbox.Key)) {
		var all sync.WaitGroup
		next := make(chan sandbox.Key)
		for range 8 {
			all.Go(func() {
				for k := range next {
					do(now.Load(), k)
				}
			})
		}
		for _, k := range claimed {
			next <- k
		}
		close(next)
		all.Wait()
	}
	works := func(s sandbox.Sandbox, err error) bool {
		if err == nil {
			tr.note(s)
		}
		return err == nil
	}
	claim := func(m *Manager, k sandbox.Key) {
		s, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: k, Spec: sandbox.ClaimSpec{Pool: "pool"}})
		works(s, err)
	}
	each(claim)
	churn := func(m *Manager, k sandbox.Key) {
		switch rand.IntN(4) {
		case 0:
			works(m.Kill(t.Context(), k))
			claim(m, k)
		default:
			works(m.Pause(t.Context(), k))
			works(m.Resume(t.Context(), k))
		}
	}

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	stall := make(chan struct{})
	var all []*observer
	var watching sync.WaitGroup
	for i := range 20 {
		o := &observer{name: fmt.Sprintf("watcher %d", i), impatient: i%2 == 1}
		if i%4 == 0 {
			o.namespace = spaces[i/4%len(spaces)]
		}
		if i == 19 {
			o.stall, o.impatient = stall, false
		}
		all = append(all, o)
		watching.Go(func() { o.follow(ctx, now.Load) })
	}
	for round := range rounds {
		each(churn)
		m := now.Load()
		if count, bytes := m.changes.kept(); count > keep || bytes > keepChangeBytes {
			t.Errorf("%d changes of %d bytes are kept", count, bytes)
		}
		compacted := make(chan journal.Compaction, 8)
		m.db.ObserveCompactions(func(c journal.Compaction) { compacted <- c })
		waste(t, m.db)
		if c := <-compacted; c.Err != nil {
			t.Errorf("round %d: %v", round, c.Err)
		}
		each(churn)
		if round == rounds-1 {
			break
		}
		m.crash() // in the middle of the work of watches and statuses
		open()
	}
	m = now.Load()
	close(stall)
	want := map[sandbox.Namespace]map[sandbox.ID]sandbox.Sandbox{"": {}}
	for _, n := range spaces {
		want[n] = map[sandbox.ID]sandbox.Sandbox{}
		for after := ""; ; {
			page, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: n, Page: sandbox.Page{After: after, Limit: 100}})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range page {
				want[n][s.ID], want[""][s.ID], after = s, s, s.Position()
			}
			if len(page) < 100 {
				break
			}
		}
	}
	// Each namespace has one last change, which its watchers and those of all wait for.
	last := map[sandbox.Namespace]uint64{}
	for _, s := range want[""] {
		for _, n := range []sandbox.Namespace{s.Namespace, ""} {
			last[n] = max(last[n], s.ResourceVersion)
		}
	}
	for version, w := range tr.all {
		for _, n := range []sandbox.Namespace{w.namespace, ""} {
			last[n] = max(last[n], version)
		}
	}
	for _, o := range all {
		for tick := time.NewTicker(5 * time.Millisecond); o.at.Load() < last[o.namespace]; <-tick.C {
			if t.Context().Err() != nil {
				t.Fatalf("%s is at %d, not at %d", o.name, o.at.Load(), last[o.namespace])
			}
		}
	}
	stop()
	watching.Wait()
	for _, o := range all {
		o.check(t, tr, want[o.namespace])
	}
	if all[19].tooOld == 0 {
		t.Error("the watcher that has stalled was not told that it is too late")
	}
	t.Logf("%d sandboxes, %d changes", len(want[""]), len(tr.all))
}

// kept is how much is kept.
func (cs *changes) kept() (count, bytes int) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return len(cs.all), cs.bytes
}

// waste makes most of a journal free.
func waste(t *testing.T, db *journal.DB) {
	t.Helper()
	blobs := journal.Collection[[]byte]("blobs")
	for _, do := range []func(tx *journal.Tx, key string) error{
		func(tx *journal.Tx, key string) error { return blobs.Put(tx, key, make([]byte, 2<<20)) }, blobs.Delete,
	} {
		if err := db.Update(func(tx *journal.Tx) (err error) {
			for i := range 24 {
				err = errors.Join(err, do(tx, fmt.Sprint(i)))
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}
