package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/peer"
	"agentrun.dev/internal/storage/snapshot"
)

// TestDeleteWhileOtherFetches: a template is deleted at once, even while another one is
// fetching the same snapshot. The parts that the other has fetched stay.
func TestDeleteWhileOtherFetches(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	pulling, release := make(chan struct{}), make(chan struct{})
	w.pull = func(string, PullRequest) (*snapshot.Snapshot, error) {
		close(pulling)
		<-release
		return nil, errors.New("no such pack")
	}
	first := fetchOf(o)
	first.Pack = "registry.example.com/team/py:1"
	sure(b.FetchTemplate(t.Context(), first))(t)
	<-pulling
	if err := os.Mkdir(b.partsDir(o.Digest), 0o700); err != nil {
		t.Fatal(err)
	}
	other := fetchOf(o, "a")
	other.Name = "other"
	sure(b.FetchTemplate(t.Context(), other))(t)
	b.mu.Lock()
	run := b.builds[buildKey{Template: other.Key, Revision: o.Revision, Stage: sandbox.AfterReady}]
	b.mu.Unlock()
	<-run.begun
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := b.DeleteTemplate(ctx, other.Key); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(b.partsDir(o.Digest)); err != nil {
		t.Errorf("what another one fetches is gone: %v", err)
	}
	close(release)
	if got := b.until(pyKey, over); got.Phase != sandbox.PhaseFailed {
		t.Errorf("%+v", got)
	}
	b.wantNothingLeft()
}

// TestFetchBesideSame: templates that wait for the same snapshot keep no other one waiting.
func TestFetchBesideSame(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	third := fetchOf(o, "a")
	third.Name, third.Spec.MilliCPUs = "third", 2000
	sure(a.ApplyTemplate(t.Context(), third.Key, third.Spec))(t)
	if third.Offer = a.offer(a.until(third.Key, over)); third.Offer.Digest == o.Digest {
		t.Fatal("the same snapshot")
	}
	pulling, release := make(chan struct{}), make(chan struct{})
	w.pull = func(string, PullRequest) (*snapshot.Snapshot, error) {
		close(pulling)
		<-release
		return nil, errors.New("no such pack")
	}
	first := fetchOf(o)
	first.Pack = "registry.example.com/team/py:1"
	sure(b.FetchTemplate(t.Context(), first))(t)
	defer close(release)
	<-pulling
	for n := range fetches {
		same := fetchOf(o, "a")
		same.Name = sandbox.Name(fmt.Sprintf("same-%d", n))
		sure(b.FetchTemplate(t.Context(), same))(t)
		b.mu.Lock()
		run := b.builds[buildKey{Template: same.Key, Revision: o.Revision, Stage: sandbox.AfterReady}]
		b.mu.Unlock()
		<-run.begun
	}
	sure(b.FetchTemplate(t.Context(), third))(t)
	if got := b.until(third.Key, over); got.Phase != sandbox.PhaseReady {
		t.Errorf("%+v", got)
	}
}

// TestDropBeforeBegun: a build that is not wanted any more before it has begun leaves nothing.
func TestDropBeforeBegun(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	k := buildKey{Template: pyKey, Revision: o.Revision, Stage: sandbox.AfterReady}
	dropped := sandbox.Build{Template: pyKey, Revision: o.Revision, Stage: sandbox.AfterReady, Snapshot: sandbox.NewID(), Fetch: &sandbox.FetchOrder{Digest: o.Digest}}
	err := errors.Join(os.WriteFile(b.orderFile(dropped.Snapshot), o.Manifest, 0o600), os.Mkdir(b.partsDir(o.Digest), 0o700))
	if err != nil {
		t.Fatal(err)
	}
	if ended, err := b.endDropped([]sandbox.Build{dropped}); err != nil || len(ended) > 0 || b.builds[k] != nil {
		t.Errorf("%v, %v", ended, err)
	}
	b.wantNothingLeft()
}

// TestWhyNotFetched: which failures are tried again, and which are not.
func TestWhyNotFetched(t *testing.T) {
	other := errors.New("damaged")
	for _, c := range []struct {
		err                error
		interrupted, short bool
	}{
		{fmt.Errorf("fetch: %w: %w", peer.ErrLate, context.DeadlineExceeded), true, false},
		{&peer.MissingError{Parts: 1, Of: 1, Layers: 1}, true, false},
		{&peer.MissingError{Parts: 1, Of: 1, Layers: 1, Busy: true}, false, true},
		{other, false, false},
	} {
		err := whyNotFetched(c.err)
		if wasInterrupted(err) != c.interrupted || lacksRoom(err) != c.short {
			t.Errorf("%v: interrupted: %v, short: %v", err, wasInterrupted(err), lacksRoom(err))
		}
	}
}
