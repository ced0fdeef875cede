package node

import (
	"context"
	"fmt"
	"slices"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// forkOwned is Fork for children with owners: a repeated request gets the existing fork.
func (m *Manager) forkOwned(ctx context.Context, r sandbox.ForkRequest) (f sandbox.Fork, replayed bool, err error) {
	if err := m.begin(); err != nil {
		return f, false, err
	}
	// One turn each, taken in the same order by all calls.
	turns := []string{"fork " + r.Key.String()}
	for _, c := range r.Spec.Children {
		if err := sandbox.MayGive(ctx, c.Owner); err != nil {
			return f, false, err
		}
		turns = append(turns, ownerKey(r.Namespace, c.Owner))
	}
	if r.Once != nil {
		return f, false, sandbox.Invalid("owner", "the request has an idempotency key, too: the owners are the key")
	}
	if err := r.Spec.ValidateAs(r.Name); err != nil {
		return f, false, err
	}
	asked, err := askedByFork(r)
	if err != nil {
		return f, false, err
	}
	slices.Sort(turns)
	for _, turn := range turns {
		done, err := m.ownerTurns.take(ctx, turn)
		if err != nil {
			return f, false, fmt.Errorf("fork sandbox %s for owners: %w", r.Spec.Source, err)
		}
		defer done()
	}
	var found bool
	err = m.db.View(func(tx *journal.Tx) (err error) {
		f, found, err = forks.Get(tx, r.Key.String())
		return err
	})
	switch {
	case err != nil:
		return f, false, err
	case !found || f.Asked == nil || f.Phase == sandbox.PhasePending:
		// fork refuses the name if a fork without owners has it, or one that could
		// neither be made nor forgotten.
		f, err = m.fork(ctx, r, asked, nil)
		return f, false, err
	}
	if differ := differing(f.Asked, asked); differ != "" {
		return f, false, sandbox.Errorf(sandbox.CodeConflict, "the fork %s was asked for otherwise", r.Name).
			Because("these fields differ: %s", differ).Try("Ask for the same, or use another name")
	}
	return f, true, nil
}

// askedByFork returns a digest of each field of a fork of children with owners, except for
// their tokens.
func askedByFork(r sandbox.ForkRequest) (map[string]string, error) {
	type child struct {
		Name  sandbox.Name
		Owner sandbox.UID
	}
	var children []child
	for i := range r.Spec.Replicas {
		c := r.Spec.Child(r.Name, i)
		children = append(children, child{c.Name, c.Owner})
	}
	fields := map[string]any{"source": r.Spec.Source, "children": children, "atomic": r.Spec.Atomic}
	if r.Spec.Checkpoint != "" {
		fields["checkpoint"] = r.Spec.Checkpoint
	}
	if p := r.Spec.NetworkPolicy; p != nil {
		fields["network_policy"] = p
	}
	return digests(fields)
}

// askedOfChild is the record that a claim of a child's owner is compared with. It equals
// that of no claim.
func askedOfChild(f sandbox.Fork, name sandbox.Name) (map[string]string, error) {
	return digests(map[string]any{"name": name, "fork": f.Name})
}

// mayHave refuses another sandbox for an owner that has one. The caller has the
// owner's turn.
func (m *Manager) mayHave(n sandbox.Namespace, owner sandbox.UID) error {
	if owner == "" {
		return nil
	}
	r, found, err := m.ownerOf(n, owner)
	if err == nil && found {
		err = sandbox.Errorf(sandbox.CodeConflict, "the owner %s has the sandbox %s", owner, r.Name).Try("Release it once that has ended")
	}
	return err
}
