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

// ownerRecord is the record of an owner's sandbox. It outlives the sandbox's own record,
// so that a repeated claim of the owner never makes a second sandbox.
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

// The journal's collections of owners. docs/design/owners.md describes all of
// it.
var (
	owners      = journal.Collection[ownerRecord]("owners")
	ownersByEnd = journal.Collection[string]("owners-by-end")
	ownersEnded = journal.Collection[int]("owners-ended")
)

// The record of an owner is kept for keepOwners after the end of its sandbox, unless it
// is released. maxOwnersEnded bounds the records of ended sandboxes in a namespace.
const (
	keepOwners     = 7 * 24 * time.Hour
	maxOwnersEnded = 100_000
	maxOwnerDetail = 256
)

func ownerKey(n sandbox.Namespace, owner sandbox.UID) string { return string(n) + "/" + string(owner) }

func (r ownerRecord) key() string { return ownerKey(r.Namespace, r.Owner) }

// over reports whether the record has expired.
func (r ownerRecord) over(now time.Time) bool {
	return !r.Ended.IsZero() && now.Sub(r.Ended) >= keepOwners
}

// sandbox returns the known fields of the owner's sandbox, after the sandbox's
// own record was forgotten.
func (r ownerRecord) sandbox() sandbox.Sandbox {
	return sandbox.Sandbox{
		Key: r.Key, Versioned: r.Versioned, ID: r.ID, Owner: r.Owner, Pool: r.Pool, Created: r.Created,
		State: sandbox.Ended, Ended: r.Ended, Reason: r.Reason, Detail: r.Detail,
	}
}

// claimOwned is Claim for an owner: repeated claims, by any principal, make only one
// sandbox.
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

// putOwner records the sandbox of an owner without one, in the transaction that makes the
// sandbox.
func putOwner(tx *journal.Tx, s sandbox.Sandbox, asked map[string]string) error {
	next := ownerRecord{Key: s.Key, Owner: s.Owner, ID: s.ID, Pool: s.Pool, Created: s.Created, Asked: asked}
	old, found, err := owners.Get(tx, next.key())
	if found { // the old record has expired
		err = forgetOwner(tx, old)
	}
	return errors.Join(err, owners.Put(tx, next.key(), next))
}

// ownerOf returns the record of an owner, if it exists. It refuses a new owner if the
// namespace has too many records of ended sandboxes.
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

// askedBy returns a digest of each field that a claim sets, except those that may differ
// when the claim is repeated: the token, and secrets.
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

// digests returns the digests of fields, by name.
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

// check refuses a claim that asks for something else than the first one.
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

// endOwner records the end of an owner's sandbox, in the transaction that ends it, and
// forgets some expired records.
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

// ownersStep is how many records one transaction of forgetOverOwners forgets.
const ownersStep = 256

// forgetOverOwners forgets all expired records, even if no sandbox of an owner ends any more.
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

// forgetOldOwners forgets some expired records, and reports whether more may be left.
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

// ReleaseOwner forgets an owner whose sandbox has ended. After that a claim for it makes a
// new sandbox. It waits for a claim that is under way, which may still make a sandbox.
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

// oneOwner returns the given owner, if there is one.
func oneOwner(given []sandbox.UID) sandbox.UID {
	if len(given) == 0 {
		return ""
	}
	return given[0]
}

// give returns the owner of an object that is applied: the given owner, or else the present
// one.
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
