package forkd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/test/soak"
)

// victim is a node whose daemon is killed again and again.
type victim struct {
	*node
	known *told
	seen  *traces
	// revision is the pool's revision. next is the one that it may have instead: the
	// request for it was cut off, unless nextTold is set.
	revision, next string
	nextTold       bool
}

// in returns the victim for a subtest.
func (v *victim) in(t *testing.T) *victim {
	of := *v
	of.node = &node{Daemon: v.Daemon, t: t}
	return &of
}

// ordeal is an operation during which the daemon is killed.
type ordeal struct {
	moments []moment
	// do is cut off by the kill. It reports all other errors.
	do func(v *victim, ctx context.Context, round string)
	// after checks the result.
	after func(v *victim, round string)
}

// TestKilledDuring: the daemon is killed during a rollout, a build, a burst of claims and
// hibernations, at chosen and at random moments. The next daemon has every sandbox that a
// client was told of, exactly once and with its memory. Pools reach their size and their
// revision, and builds finish. Every process and every file belongs to a record.
func TestKilledDuring(t *testing.T) {
	v := &victim{
		node: newNode(t), seen: new(traces), revision: "first",
		known: newTold(),
	}
	v.OwnPrograms(t)
	v.up()
	v.template(pythonImage(t))
	v.settles()
	for name, o := range ordeals {
		t.Run(name, func(t *testing.T) { v.in(t).endure(name, o) })
	}
	for name := range v.known.holds {
		if _, err := v.Client.Kill(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
	v.settles()
	v.noGroups(v.seen)
	v.end(v.seen)
}

const anyMoment = 4 * time.Second

var ordeals = map[string]ordeal{
	"rollout": {
		moments: []moment{
			{name: "the snapshot is complete", folder: "snapshots", event: complete},
			{name: "the first sandbox of the revision begins", folder: "machines", event: begun},
			{name: "an earlier sandbox has ended", folder: "machines", event: removed},
			{name: "the earlier snapshot is being deleted", folder: "snapshots", event: removed},
			{within: anyMoment},
		},
		do: (*victim).rollOut, after: (*victim).checkRevision,
	},
	"build": {
		moments: []moment{
			{name: "the log is there", folder: "logs", event: begun},
			{name: "the snapshot is being written", folder: "snapshots", event: begun, hidden: true},
			{name: "the snapshot is complete", folder: "snapshots", event: complete},
			{within: anyMoment},
		},
		do:    (*victim).build,
		after: (*victim).useBuilt,
	},
	"claims": {
		moments: []moment{
			{name: "a machine begins", folder: "machines", event: begun},
			{name: "the third machine begins", folder: "machines", event: begun, count: 3},
			{within: time.Second},
		},
		do:    (*victim).burst,
		after: func(v *victim, round string) { v.claimAll(v.t.Context(), round) }, // repeat the claims
	},
	"hibernation": {
		moments: []moment{
			{name: "one is being written", folder: "images", event: begun, hidden: true},
			{name: "one is written", folder: "images", event: complete},
			{name: "a machine has ended", folder: "machines", event: removed},
			{name: "a machine begins that wakes", folder: "machines", event: begun},
			{name: "one is awake", folder: "images", event: removed},
			{within: 2 * time.Second},
		},
		do: (*victim).sleepAndWake,
	},
}

// endure kills the daemon several times during an ordeal.
func (v *victim) endure(name string, o ordeal) {
	order := rand.Perm(len(o.moments))
	for i := range soak.Count(20, 2) {
		at, round := o.moments[order[i%len(order)]], fmt.Sprintf("%s-%d", name, i)
		come, stop := at.watch(v.t, v.State)
		ctx, cancel := context.WithCancel(v.t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			o.do(v, ctx, round)
		}()
		select {
		case <-come:
		case <-time.After(2 * time.Minute):
			v.t.Errorf("%s: it never came to that: %s", round, at.name)
		}
		if rand.IntN(2) == 0 {
			time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond) // the kill cuts off a later step
		}
		v.Kill()
		v.seen.noteOwn(v.node)
		cancel()
		<-done
		stop()
		v.t.Logf("%s: killed: %s", round, at.name)
		v.up()
		v.settles()
		if o.after != nil {
			o.after(v, round)
			v.settles()
		}
		v.examine(v.known)
		v.thin(v.known, 3)
		v.settles()
	}
}

// failed reports an error, unless it comes from the kill.
func (v *victim) failed(what string, err error) bool {
	if err != nil && !cutOff(err) {
		v.t.Errorf("%s: %v", what, err)
	}
	return err != nil
}

// claim claims a new sandbox and makes it remember a value.
func (v *victim) claim(ctx context.Context, name, key string) {
	v.known.unsure(name)
	_, err := v.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: "pool"}, key)
	if v.failed("claim "+name, err) {
		return
	}
	v.known.answer(name)
	value, err := v.mark(ctx, name)
	if !v.failed("mark "+name, err) {
		v.known.set(name, value)
	}
}

// rollOut gives the pool's template another revision, and claims sandboxes until it is
// cut off.
func (v *victim) rollOut(ctx context.Context, round string) {
	spec := python()
	spec.Env = map[string]string{"REVISION": round}
	v.next, v.nextTold = round, false
	_, err := v.Client.PutTemplate(ctx, "python", spec)
	if v.failed("change the template", err) {
		return
	}
	v.nextTold = true
	for i := range 2 {
		v.claim(ctx, fmt.Sprintf("%s-%d", round, i), "")
	}
	<-ctx.Done()
}

// checkRevision checks the revision of the pool's sandboxes.
func (v *victim) checkRevision(round string) {
	name := round + "-after"
	v.claim(v.t.Context(), name, "")
	r, err := v.Client.RunCode(v.t.Context(), name, rest.CodeRequest{Code: "import os; print(os.environ.get('REVISION', 'first'), warm, end='')"})
	got, warm := strings.CutSuffix(r.Stdout, " 1")
	if err != nil || !warm || got != v.next && (v.nextTold || got != v.revision) {
		v.t.Errorf("the pool's sandboxes are of revision %q, not of %s: %+v, %v", got, v.next, r, err)
	}
	v.revision = got
}

// build builds a template that has no pool.
func (v *victim) build(ctx context.Context, round string) {
	_, err := v.Client.PutTemplate(ctx, round, python())
	v.failed("apply a template", err)
	<-ctx.Done()
}

// useBuilt claims a sandbox of the template, whose build must finish without
// another request.
func (v *victim) useBuilt(round string) {
	ctx := v.t.Context()
	var log strings.Builder
	if err := v.Client.TemplateLog(ctx, round, rest.GetTemplateLogParams{}, &log); err != nil || !strings.Contains(log.String(), "== ready") {
		v.t.Errorf("the log of %s: %v\n%s", round, err, &log)
	}
	if _, err := v.Client.PutPool(ctx, round, rest.PoolSpec{Template: round, Replicas: 0}); err != nil {
		v.t.Fatal(err)
	}
	v.waitReady(ctx, round)
	_, err := v.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: round, Pool: round}, "")
	if err == nil {
		r, runErr := v.Client.RunCode(ctx, round, rest.CodeRequest{Code: "print(warm)"})
		_, killErr := v.Client.Kill(ctx, round)
		if err = errors.Join(runErr, killErr); r.Stdout != "1\n" {
			v.t.Errorf("the template is not warm: %+v", r)
		}
	}
	if err = errors.Join(err, v.Client.DeletePool(ctx, round), v.Client.DeleteTemplate(ctx, round)); err != nil {
		v.t.Error(err)
	}
}

// burst makes more claims at a time than the pool has sandboxes.
func (v *victim) burst(ctx context.Context, round string) {
	v.claimAll(ctx, round)
	<-ctx.Done()
}

// claimAll makes the claims of a burst. Claims that were answered before get the
// same sandbox again, and so do claims that were cut off.
func (v *victim) claimAll(ctx context.Context, round string) {
	var all sync.WaitGroup
	for i := range 5 {
		name := fmt.Sprintf("%s-%d", round, i)
		if v.known.has(name) {
			continue
		}
		all.Go(func() { v.claim(ctx, name, "key-"+name) })
	}
	all.Wait()
}

// sleepAndWake hibernates and wakes sandboxes until it is cut off.
func (v *victim) sleepAndWake(ctx context.Context, round string) {
	for i := range 2 {
		v.claim(ctx, fmt.Sprintf("%s-%d", round, i), "")
	}
	for ctx.Err() == nil {
		var all sync.WaitGroup
		for _, name := range v.known.names() {
			all.Go(func() {
				_, err := v.Client.Do(ctx, name, client.Hibernate)
				if err == nil {
					_, err = v.Client.Do(ctx, name, client.Resume)
				}
				v.failed("hibernate and wake "+name, err)
			})
		}
		all.Wait()
	}
}
