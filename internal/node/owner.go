package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// ownerRecord is what is known of an owner's sandbox, also when that is forgotten: whoever
// asks for it again never gets a second one.
type ownerRecord struct {
	sandbox.Key // of the sandbox
	sandbox.Versioned
	Owner   sandbox.UID  `json:"owner"`
	ID      sandbox.ID   `json:"id"`
	Pool    sandbox.Name `json:"pool"`
	Created time.Time    `json:"created"`
	// Asked has a digest of each field that the claim has set.
	Asked map[string]string `json:"asked"`

	Ended  time.Time      `json:"ended,omitzero"`
	Reason sandbox.Reason `json:"reason,omitempty"`
	Detail string         `json:"detail,omitempty"`
}

// The journal's collections of owners. docs/design/owners.md has the whole.
var (
	owners      = journal.Collection[ownerRecord]("owners")
	ownersByEnd = journal.Collection[string]("owners-by-end")
	ownersEnded = journal.Collection[int]("owners-ended")
)

// An owner is known for keepOwners after the end of its sandbox, unless it is released. A
// namespace has at most so many that have ended.
const (
	keepOwners     = 7 * 24 * time.Hour
	maxOwnersEnded = 100_000
	maxOwnerDetail = 256
)

func ownerKey(n sandbox.Namespace, owner sandbox.UID) string { return string(n) + "/" + string(owner) }

func (r ownerRecord) key() string { return ownerKey(r.Namespace, r.Owner) }

// over reports whether the owner is not known any more.
func (r ownerRecord) over(now time.Time) bool {
	return !r.Ended.IsZero() && now.Sub(r.Ended) >= keepOwners
}

// sandbox is what is known of the owner's sandbox once its record is forgotten.
func (r ownerRecord) sandbox() sandbox.Sandbox {
	return sandbox.Sandbox{
		Key: r.Key, Versioned: r.Versioned, ID: r.ID, Owner: r.Owner, Pool: r.Pool, Created: r.Created,
		State: sandbox.Ended, Ended: r.Ended, Reason: r.Reason, Detail: r.Detail,
	}
}

// claimOwned is Claim for an owner: it makes one sandbox, whoever asks and however often.
func (m *Manager) claimOwned(ctx context.Context, r sandbox.ClaimRequest) (s sandbox.Sandbox, replayed bool, err error) {
	if err := m.begin(); err != nil {
		return s, false, err
	}
	asked, err := askedBy(r)
	if err != nil {
		return s, false, err
	}
	done, err := m.ownerTurns.take(ctx, ownerKey(r.Namespace, r.Owner))
	if err != nil {
		return s, false, fmt.Errorf("claim for the owner %s: %w", r.Owner, err)
	}
	defer done()
	before, found, err := m.ownerOf(r.Namespace, r.Owner)
	switch {
	case err != nil:
		return s, false, err
	case found:
		if err := before.check(asked); err != nil {
			return s, false, err
		}
		s, err = m.present(before.sandbox())
		return s, true, err
	}
	s, err = m.claim(ctx, r, func(tx *journal.Tx, s sandbox.Sandbox) error { return putOwner(tx, s, asked) })
	return s, false, err
}

// putOwner notes the sandbox of an owner that has none, in the transaction that makes it.
func putOwner(tx *journal.Tx, s sandbox.Sandbox, asked map[string]string) error {
	next := ownerRecord{Key: s.Key, Owner: s.Owner, ID: s.ID, Pool: s.Pool, Created: s.Created, Asked: asked}
	old, found, err := owners.Get(tx, next.key())
	if found { // it is over
		err = forgetOwner(tx, old)
	}
	return errors.Join(err, owners.Put(tx, next.key(), next))
}

// ownerOf is what is known of an owner, if it is. One that is new is refused where too many
// have ended.
func (m *Manager) ownerOf(n sandbox.Namespace, owner sandbox.UID) (r ownerRecord, found bool, err error) {
	past := 0
	err = m.db.View(func(tx *journal.Tx) error {
		if r, found, err = owners.Get(tx, ownerKey(n, owner)); err != nil {
			return err
		}
		if found = found && !r.over(time.Now()); found {
			return nil
		}
		past, _, err = ownersEnded.Get(tx, string(n))
		return err
	})
	if err != nil || found || past < maxOwnersEnded {
		return r, found, err
	}
	if err := m.forgetOverOwners(time.Now()); err != nil {
		return r, false, err
	}
	err = m.db.View(func(tx *journal.Tx) error {
		past, _, err = ownersEnded.Get(tx, string(n))
		return err
	})
	if err == nil && past >= maxOwnersEnded {
		err = sandbox.Errorf(sandbox.CodeCapacity, "namespace %s has %d owners whose sandboxes have ended", n, past).
			Try("Release those that their controllers need no more")
	}
	return r, false, err
}

// askedBy has a digest of each field that a claim sets, but for what may differ when it is
// made again: the token, and secrets.
func askedBy(r sandbox.ClaimRequest) (map[string]string, error) {
	l := r.Spec.Lifetime
	if l.OnTimeout == sandbox.TimeoutKill {
		l.OnTimeout = ""
	}
	fields := map[string]any{"name": r.Name, "pool": r.Spec.Pool}
	set := func(field string, value any, is bool) {
		if is {
			fields[field] = value
		}
	}
	set("env", r.Spec.Env, len(r.Spec.Env) > 0)
	set("metadata", r.Spec.Metadata, len(r.Spec.Metadata) > 0)
	set("network_policy", r.Spec.NetworkPolicy, r.Spec.NetworkPolicy != nil)
	set("lifetime.timeout", l.Timeout, l.Timeout != 0)
	set("lifetime.idle_timeout", l.IdleTimeout, l.IdleTimeout != 0)
	set("lifetime.on_timeout", l.OnTimeout, l.OnTimeout != "")
	set("lifetime.expires", l.Expires.UTC(), !l.Expires.IsZero())
	return digests(fields)
}

// digests are those of fields, by name.
func digests(fields map[string]any) (map[string]string, error) {
	out := make(map[string]string, len(fields))
	for name, value := range fields {
		body, err := json.Marshal(value)
		if err != nil {
			return nil, fmt.Errorf("read the request's %s: %w", name, err)
		}
		sum := sha256.Sum256(body)
		out[name] = hex.EncodeToString(sum[:16])
	}
	return out, nil
}

// check refuses a claim that asks for something else than the one before.
func (r ownerRecord) check(asked map[string]string) error {
	differ := differing(r.Asked, asked)
	if differ == "" {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeConflict, "the owner %s has the sandbox %s, which was claimed otherwise", r.Owner, r.Name).
		Because("these fields differ: %s", differ).Try("Ask for the same, or use another owner")
}

// differing names the fields whose digests differ, sorted.
func differing(before, now map[string]string) string {
	names := map[string]bool{}
	for _, fields := range []map[string]string{before, now} {
		for name := range fields {
			if before[name] != now[name] {
				names[name] = true
			}
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(names)), ", ")
}

// endOwner notes the end of an owner's sandbox, in the transaction that ends it, and forgets
// some of those that are over.
func endOwner(tx *journal.Tx, s sandbox.Sandbox) error {
	if s.Owner == "" {
		return nil
	}
	r, found, err := owners.Get(tx, ownerKey(s.Namespace, s.Owner))
	if err != nil || !found || r.ID != s.ID || !r.Ended.IsZero() {
		return err
	}
	r.Ended, r.Reason, r.Detail = s.Ended, s.Reason, strings.ToValidUTF8(s.Detail[:min(len(s.Detail), maxOwnerDetail)], "")
	past, _, err := ownersEnded.Get(tx, string(r.Namespace))
	err = errors.Join(err, owners.Put(tx, r.key(), r), ownersByEnd.Put(tx, journal.TimeKey(r.Ended, r.key()), r.key()),
		ownersEnded.Put(tx, string(r.Namespace), past+1))
	_, forgetErr := forgetOldOwners(tx, s.Ended, forgetStep)
	return errors.Join(err, forgetErr)
}

// ownersStep is how many owners a transaction forgets that does nothing else.
const ownersStep = 256

// forgetOverOwners forgets all that are over: also where no sandbox of an owner ends any more.
func (m *Manager) forgetOverOwners(now time.Time) error {
	for more := true; more; {
		err := m.db.Update(func(tx *journal.Tx) (err error) {
			more, err = forgetOldOwners(tx, now, ownersStep)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// forgetOldOwners forgets some of those that are over, and says whether there may be more.
func forgetOldOwners(tx *journal.Tx, now time.Time, most int) (more bool, err error) {
	for range most {
		at, key, found, err := ownersByEnd.First(tx, "")
		if err != nil || !found || at > journal.TimeKey(now.Add(-keepOwners), "") {
			return false, err
		}
		r, found, err := owners.Get(tx, key)
		if err == nil && found {
			err = forgetOwner(tx, r)
		}
		if err = errors.Join(err, ownersByEnd.Delete(tx, at)); err != nil {
			return false, err
		}
	}
	return true, nil
}

// forgetOwner forgets an owner whose sandbox has ended.
func forgetOwner(tx *journal.Tx, r ownerRecord) error {
	past, _, err := ownersEnded.Get(tx, string(r.Namespace))
	if past > 1 {
		err = errors.Join(err, ownersEnded.Put(tx, string(r.Namespace), past-1))
	} else {
		err = errors.Join(err, ownersEnded.Delete(tx, string(r.Namespace)))
	}
	return errors.Join(err, owners.Delete(tx, r.key()), ownersByEnd.Delete(tx, journal.TimeKey(r.Ended, r.key())))
}

// ReleaseOwner forgets an owner whose sandbox has ended: a claim of it makes another one. It
// waits for a claim that is under way: that may be going to have a sandbox.
func (m *Manager) ReleaseOwner(ctx context.Context, r sandbox.ReleaseRequest) error {
	if err := errors.Join(m.begin(), sandbox.MayGive(ctx, r.Owner)); err != nil {
		return err
	}
	done, err := m.ownerTurns.take(ctx, ownerKey(r.Namespace, r.Owner))
	if err != nil {
		return fmt.Errorf("release the owner %s: %w", r.Owner, err)
	}
	defer done()
	return m.db.Update(func(tx *journal.Tx) error {
		of, found, err := owners.Get(tx, ownerKey(r.Namespace, r.Owner))
		switch {
		case err != nil:
			return err
		case !found:
			return sandbox.Errorf(sandbox.CodeNotFound, "the owner %s has no sandbox in namespace %s", r.Owner, r.Namespace)
		case of.Ended.IsZero():
			return sandbox.Errorf(sandbox.CodeConflict, "the owner %s has the sandbox %s, which has not ended", r.Owner, of.Name).
				Try("End it first")
		}
		return forgetOwner(tx, of)
	})
}

// oneOwner is the owner that was given, if one was.
func oneOwner(given []sandbox.UID) sandbox.UID {
	if len(given) == 0 {
		return ""
	}
	return given[0]
}

// give is the owner of an object that is applied: the one that is given, or else the one that
// it has.
func give(ctx context.Context, now sandbox.Identity, given sandbox.UID) (sandbox.UID, error) {
	if err := sandbox.MayChange(ctx, now); err != nil {
		return "", err
	}
	switch {
	case given == "" || given == now.Owner:
		return now.Owner, nil
	case now.Owner != "":
		return "", sandbox.Errorf(sandbox.CodeConflict, "%s %s has the owner %s, not %s", now.Kind, now.Name, now.Owner, given).
			Try("Delete it first, if its owner is gone")
	}
	return given, nil
}
