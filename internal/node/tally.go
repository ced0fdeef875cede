package node

import (
	"cmp"
	"errors"
	"io/fs"
	"slices"
	"sync"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// tally keeps the numbers for the node's status. The commits keep it in line with the
// journal. So a status costs the same for any number of sandboxes, builds and checkpoints.
type tally struct {
	mu     sync.Mutex // protects all following fields
	states map[sandbox.ID]sandbox.State
	counts map[sandbox.State]int
	// checkpoints has all checkpoints by key, including unfinished ones.
	checkpoints map[string]sandbox.ID
	// built has the ready builds, by key.
	built map[string]readyBuild
	// changes counts the changes of built. listed is its value when snapshots was made
	// from built.
	changes, listed uint64
	snapshots       []sandbox.NodeSnapshot // is replaced, never changed
	// pools has the template of each pool, users the pools of each template.
	pools map[sandbox.Key]sandbox.Key
	users map[sandbox.Key]map[sandbox.Name]bool

	// weighing protects disk, and is held by the goroutine that changes it. It is
	// locked before mu.
	weighing sync.Mutex
	disk     snapshot.Usage
	// arrived are checkpoints that disk does not count yet, departed those that it
	// still counts. mu protects both.
	arrived, departed map[sandbox.ID]bool
}

// readyBuild is a build's snapshot. Its digest is set once it was asked for.
type readyBuild struct {
	sandbox.NodeSnapshot
	id sandbox.ID
}

func newTally() *tally {
	return &tally{
		states: map[sandbox.ID]sandbox.State{}, counts: map[sandbox.State]int{},
		checkpoints: map[string]sandbox.ID{}, built: map[string]readyBuild{}, changes: 1,
		pools: map[sandbox.Key]sandbox.Key{}, users: map[sandbox.Key]map[sandbox.Name]bool{},
		arrived: map[sandbox.ID]bool{}, departed: map[sandbox.ID]bool{},
	}
}

// read counts the objects of the journal, before the first of them is changed. all has the
// sandboxes, which were read already.
func (t *tally) read(tx *journal.Tx, all []sandbox.Sandbox) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range all {
		t.setState(s.ID, s.State)
	}
	return errors.Join(
		checkpoints.Each(tx, "", func(k string, c sandbox.Checkpoint) error { t.setCheckpoint(k, c.ID); return nil }),
		builds.Each(tx, "", func(k string, b sandbox.Build) error { t.setBuild(k, &b); return nil }),
		pools.Each(tx, "", func(_ string, p sandbox.Pool) error { t.setPool(p.Key, p.Spec.Template); return nil }))
}

// note takes a commit. It does not wait.
func (t *tally) note(c journal.Commit) {
	if c.Failed {
		return // no further commit follows
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, one := range c.Changes {
		switch one.Collection {
		case string(sandboxes):
			s, _ := one.Object.(sandbox.Sandbox) // the zero Sandbox of a deletion has no state
			t.setState(sandbox.ID(one.Key), s.State)
		case string(checkpoints):
			k, _ := one.Object.(sandbox.Checkpoint)
			t.setCheckpoint(one.Key, k.ID)
		case string(builds):
			if b, there := one.Object.(sandbox.Build); there {
				t.setBuild(one.Key, &b)
			} else {
				t.setBuild(one.Key, nil)
			}
		case string(pools):
			p, known := changed(pools, one)
			if !known {
				continue
			}
			if one.Object == nil {
				p.Spec.Template = ""
			}
			t.setPool(p.Key, p.Spec.Template)
		}
	}
}

// setState counts a sandbox in its state. Without a state the sandbox is gone.
func (t *tally) setState(id sandbox.ID, s sandbox.State) {
	if was, there := t.states[id]; there {
		t.counts[was]--
	}
	delete(t.states, id)
	if s != "" {
		t.states[id] = s
		t.counts[s]++
	}
}

// setCheckpoint counts a checkpoint. Without an id the checkpoint is gone.
func (t *tally) setCheckpoint(key string, id sandbox.ID) {
	// Each write makes disk weigh it again: it may be complete by now.
	if was := t.checkpoints[key]; was != "" && was != id {
		delete(t.arrived, was)
		t.departed[was] = true
	}
	delete(t.checkpoints, key)
	if id != "" {
		t.checkpoints[key] = id
		t.arrived[id] = true
	}
}

// setBuild lists a build if it is ready. nil says that the build is gone.
func (t *tally) setBuild(key string, b *sandbox.Build) {
	was, listed := t.built[key]
	if ready := b != nil && b.Phase == sandbox.PhaseReady; !ready {
		if listed {
			delete(t.built, key)
			t.changes++
		}
		return
	}
	r := readyBuild{sandbox.NodeSnapshot{Template: b.Template, Revision: b.Revision, Stage: b.Stage, Image: b.Image}, b.Snapshot}
	if was.id == r.id {
		r.Digest = was.Digest
	}
	if r != was {
		t.built[key] = r
		t.changes++
	}
}

// setPool records the template of a pool. Without a template the pool is gone.
func (t *tally) setPool(pool sandbox.Key, template sandbox.Name) {
	was := t.pools[pool]
	if delete(t.users[was], pool.Name); len(t.users[was]) == 0 {
		delete(t.users, was)
	}
	delete(t.pools, pool)
	if template == "" {
		return
	}
	of := sandbox.Key{Namespace: pool.Namespace, Name: template}
	if t.users[of] == nil {
		t.users[of] = map[sandbox.Name]bool{}
	}
	t.pools[pool], t.users[of][pool.Name] = of, true
}

// poolOf returns one of the pools of a template, if it has any. It does not
// see pools that are committed later: their makers need the turn of the template.
func (t *tally) poolOf(template sandbox.Key) (pool sandbox.Name, found bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for pool = range t.users[template] {
		return pool, true
	}
	return "", false
}

// live counts the sandboxes that have not ended, the running and the hibernated ones
// among them, and the checkpoints.
func (t *tally) live() (all, running, hibernated, checkpoints int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for s, n := range t.counts { // there are few states
		switch {
		case s == sandbox.Starting || s == sandbox.Ended:
			continue
		case s == sandbox.Hibernated:
			hibernated += n
		case runs(s):
			running += n
		}
		all += n
	}
	return all, running, hibernated, len(t.checkpoints)
}

// nodeSnapshots lists the snapshots of builds, in the order of their keys, without those
// that are being deleted. digest reads the digest of a snapshot, and is called once for
// each.
func (t *tally) nodeSnapshots(digest func(sandbox.ID) (string, error)) ([]sandbox.NodeSnapshot, error) {
	t.mu.Lock()
	if t.listed == t.changes {
		defer t.mu.Unlock()
		return t.snapshots, nil
	}
	made := t.changes
	type entry struct {
		key string
		readyBuild
	}
	all := make([]entry, 0, len(t.built))
	for k, b := range t.built {
		all = append(all, entry{k, b})
	}
	t.mu.Unlock()
	slices.SortFunc(all, func(a, b entry) int { return cmp.Compare(a.key, b.key) })
	out := make([]sandbox.NodeSnapshot, 0, len(all))
	var errs []error
	for i := range all {
		b := &all[i]
		if b.Digest == "" {
			var err error
			if b.Digest, err = digest(b.id); errors.Is(err, fs.ErrNotExist) {
				continue // it was deleted in the meantime
			} else if err != nil {
				errs = append(errs, err)
				continue
			}
		}
		out = append(out, b.NodeSnapshot)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, b := range all {
		if now, there := t.built[b.key]; there && now.id == b.id {
			now.Digest = b.Digest
			t.built[b.key] = now
		}
	}
	if err := errors.Join(errs...); err != nil {
		return out, err
	}
	if t.changes == made {
		t.snapshots, t.listed = out, made
	}
	return out, nil
}

// checkpointBytes is how much all checkpoints take on disk together, with shared data
// counted once. The folder of each is read once. dir returns the folder of a checkpoint.
func (t *tally) checkpointBytes(dir func(sandbox.ID) string) (uint64, error) {
	t.weighing.Lock()
	defer t.weighing.Unlock()
	t.mu.Lock()
	arrived, departed := t.arrived, t.departed
	t.arrived, t.departed = map[sandbox.ID]bool{}, map[sandbox.ID]bool{}
	t.mu.Unlock()
	for id := range departed {
		t.disk.Remove(dir(id))
	}
	var errs []error
	for id := range arrived {
		if _, err := t.disk.Add(dir(id)); err != nil {
			errs = append(errs, err)
			t.mu.Lock()
			if !t.departed[id] {
				t.arrived[id] = true // the next caller tries again
			}
			t.mu.Unlock()
		}
	}
	return t.disk.Bytes, errors.Join(errs...)
}
