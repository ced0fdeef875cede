package access

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// Reasons why a credential is refused. ErrExpired reveals nothing to a
// stranger: only the holder of the key gets it.
var (
	ErrUnknown = errors.New("it is not known here")
	ErrExpired = errors.New("it has expired")
)

// The collections of the journal.
var (
	keys    = journal.Collection[record]("keys")
	secrets = journal.Collection[string]("access")
)

// Keys in secrets.
const (
	// tokenSecret is the secret that the tokens of sandboxes are derived from.
	tokenSecret = "token-secret"
	// firstKeyMade exists once the first key was made.
	firstKeyMade = "first-key-made"
)

// record is a key in the journal.
type record struct {
	Key
	Digest string `json:"digest"`
}

// held is a key in memory.
type held struct {
	Key
	digest digest
	until  context.Context // ends when the key is revoked or has expired
	end    context.CancelFunc
}

// Store has the keys of a node. Its methods are safe for concurrent use.
type Store struct {
	db     *journal.DB
	secret []byte // of the tokens of sandboxes

	turn sync.Mutex // held while a goroutine makes or revokes a key, and waits for the disk

	mu sync.Mutex // protects all following fields
	// byDigest finds a key by the digest of its whole text. A client cannot
	// choose a text for its digest, so the time that the search takes reveals
	// nothing about any key.
	byDigest map[digest]*held
	byID     map[KeyID]*held
}

// Open reads the keys of a journal. The caller closes the store before the
// journal.
func Open(db *journal.DB) (*Store, error) {
	s := &Store{db: db, byDigest: map[digest]*held{}, byID: map[KeyID]*held{}}
	err := db.Update(func(tx *journal.Tx) error {
		text, found, err := secrets.Get(tx, tokenSecret)
		if err != nil {
			return err
		}
		if !found {
			fresh := make([]byte, secretBytes)
			_, _ = rand.Read(fresh) // never fails
			text = hex.EncodeToString(fresh)
			if err := secrets.Put(tx, tokenSecret, text); err != nil {
				return err
			}
		}
		if s.secret, err = hex.DecodeString(text); err != nil || len(s.secret) != secretBytes {
			return errors.New("the secret of sandbox tokens is damaged")
		}
		return keys.Each(tx, "", func(_ string, r record) error {
			sum, err := hex.DecodeString(r.Digest)
			if err != nil || len(sum) != len(digest{}) {
				return fmt.Errorf("key %s is damaged", r.ID)
			}
			s.hold(&held{Key: r.Key, digest: digest(sum)})
			return nil
		})
	})
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("read the keys: %w", err)
	}
	return s, nil
}

// Close stops the waits for keys to expire, and cuts off the requests that use
// keys.
func (s *Store) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.byID {
		h.end()
	}
}

// hold takes a key into memory. The caller holds mu, or has the only reference.
func (s *Store) hold(h *held) {
	h.until, h.end = context.WithCancel(context.Background())
	if !h.Expires.IsZero() {
		h.until, h.end = context.WithDeadline(context.Background(), h.Expires)
	}
	s.byDigest[h.digest], s.byID[h.ID] = h, h
}

// Create makes a key. Only this call returns its text.
func (s *Store) Create(spec KeySpec) (text string, k Key, err error) {
	if spec, err = spec.complete(); err != nil {
		return "", k, err
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	count, expired := s.expired(time.Now())
	if count < maxKeys {
		expired = nil
	}
	if count-len(expired) >= maxKeys {
		return "", k, sandbox.Errorf(sandbox.CodeConflict, "there are %d keys already", maxKeys).Try("Revoke some of them with `agentrun key revoke`")
	}
	text, k, err = s.create(spec, func(tx *journal.Tx) error {
		for _, h := range expired {
			if err := keys.Delete(tx, string(h.ID)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return "", k, err
	}
	for _, h := range expired {
		s.drop(h)
	}
	return text, k, nil
}

// expired counts the keys, and lists the expired ones. They are kept until they take the
// place of new keys, so that their users are told why they are refused.
func (s *Store) expired(now time.Time) (count int, found []*held) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.byID {
		if !h.Expires.IsZero() && !now.Before(h.Expires) {
			found = append(found, h)
		}
	}
	return len(s.byID), found
}

// drop takes a key out of memory.
func (s *Store) drop(h *held) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byDigest, h.digest)
	delete(s.byID, h.ID)
	h.end()
}

// create makes a key of a complete spec. The caller holds turn.
func (s *Store) create(spec KeySpec, also func(*journal.Tx) error) (text string, k Key, err error) {
	k = Key{ID: KeyID(random(keyIDLength)), Name: spec.Name, Role: spec.Role, Namespaces: spec.Namespaces, Created: time.Now().UTC()}
	if spec.Lifetime > 0 {
		k.Expires = k.Created.Add(spec.Lifetime)
	}
	text = keyPrefix + string(k.ID) + "_" + random(secretLength)
	h := &held{Key: k, digest: digestOf(text)}
	err = s.db.Update(func(tx *journal.Tx) error {
		if also != nil {
			if err := also(tx); err != nil {
				return err
			}
		}
		return keys.Put(tx, string(k.ID), record{Key: k, Digest: hex.EncodeToString(h.digest[:])})
	})
	if err != nil {
		return "", Key{}, fmt.Errorf("make a key: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold(h)
	return text, k, nil
}

// FirstKey makes the first key of a node, an admin's. It does so only once,
// even if all keys are revoked later: the users of the socket can make another.
func (s *Store) FirstKey() (text string, k Key, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	var made bool
	err = s.db.View(func(tx *journal.Tx) (err error) {
		_, made, err = secrets.Get(tx, firstKeyMade)
		return err
	})
	if err != nil {
		return "", k, fmt.Errorf("make the first key: %w", err)
	}
	if made {
		return "", k, nil
	}
	spec := KeySpec{Name: "first", Role: RoleAdmin, Namespaces: []sandbox.Namespace{AllNamespaces}}
	return s.create(spec, func(tx *journal.Tx) error { return secrets.Put(tx, firstKeyMade, "yes") })
}

// Keys lists all keys, the oldest first.
func (s *Store) Keys() []Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Key, 0, len(s.byID))
	for _, h := range s.byID {
		out = append(out, h.Key)
	}
	slices.SortFunc(out, func(a, b Key) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(string(a.ID), string(b.ID))
	})
	return out
}

// Revoke forgets a key, and cuts off the requests that use it.
func (s *Store) Revoke(id KeyID) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	s.mu.Lock()
	h := s.byID[id]
	s.mu.Unlock()
	if h == nil {
		return sandbox.Errorf(sandbox.CodeNotFound, "there is no key %s", id).Try("`agentrun key list` shows those that there are")
	}
	if err := s.db.Update(func(tx *journal.Tx) error { return keys.Delete(tx, string(id)) }); err != nil {
		return fmt.Errorf("revoke key %s: %w", id, err)
	}
	s.drop(h)
	return nil
}

// Find returns the principal of the key with this text. It takes the same steps
// for every text.
func (s *Store) Find(text string) (Principal, error) {
	d := digestOf(text)
	s.mu.Lock()
	h := s.byDigest[d]
	s.mu.Unlock()
	switch {
	case h == nil:
		return Principal{}, ErrUnknown
	case !h.Expires.IsZero() && !time.Now().Before(h.Expires):
		return Principal{}, ErrExpired
	}
	return Principal{Name: "key:" + string(h.ID), Role: h.Role, Namespaces: h.Namespaces, Until: h.until}, nil
}

// Token returns the token that gives access to one sandbox and nothing else. It
// is derived from the sandbox's id, which is never used again, and a secret of
// the node. So it is stored nowhere, is the same after a restart and for a
// repeated request, and differs for every fork.
func (s *Store) Token(id sandbox.ID) string {
	mac := hmac.New(sha256.New, s.secret)
	_, _ = mac.Write([]byte("sandbox-token/v1 " + string(id))) // never fails
	return tokenPrefix + string(id) + "_" + text32.EncodeToString(mac.Sum(nil))
}

// IsToken reports whether a text has the form of a sandbox's token.
func IsToken(text string) bool { return strings.HasPrefix(text, tokenPrefix) }

// Sandbox checks a derived token and returns the id of its sandbox. The caller
// may check only afterwards whether the sandbox exists, so that a stranger does
// not learn that.
func (s *Store) Sandbox(text string) (sandbox.ID, error) {
	name, _, _ := strings.Cut(strings.TrimPrefix(text, tokenPrefix), "_")
	want, got := digestOf(s.Token(sandbox.ID(name))), digestOf(text)
	if !hmac.Equal(want[:], got[:]) {
		return "", ErrUnknown
	}
	return sandbox.ParseID(name)
}

// Read returns the meaning of a token's text: the sandbox of a derived token, the
// hash of any other.
func (s *Store) Read(text string) sandbox.Token {
	if id, err := s.Sandbox(text); err == nil {
		return sandbox.Token{Derived: id}
	}
	return sandbox.Token{Hash: sandbox.HashToken(text)}
}

// OfSandbox returns the principal of a sandbox's token.
func OfSandbox(s sandbox.Sandbox) Principal {
	return Principal{Name: "sandbox:" + string(s.ID), Role: RoleSandbox, Namespaces: []sandbox.Namespace{s.Namespace}, Sandbox: s.ID}
}
