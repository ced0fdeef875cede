package access

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// node is a journal with a store on it, which can be opened again.
type node struct {
	*Store
	t    *testing.T
	path string
	db   *journal.DB
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, path: filepath.Join(t.TempDir(), "journal")}
	n.open()
	t.Cleanup(n.close)
	return n
}

func (n *node) open() {
	n.t.Helper()
	var err error
	if n.db, err = journal.Open(n.path); err != nil {
		n.t.Fatal(err)
	}
	if n.Store, err = Open(n.db); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) close() {
	n.t.Helper()
	n.Store.Close()
	if err := n.db.Close(); err != nil {
		n.t.Error(err)
	}
}

func (n *node) reopen() {
	n.t.Helper()
	n.close()
	n.open()
}

func (n *node) create(spec KeySpec) (string, Key) {
	n.t.Helper()
	text, k, err := n.Create(spec)
	if err != nil {
		n.t.Fatal(err)
	}
	return text, k
}

var inA = KeySpec{Name: "ci", Role: RoleUser, Namespaces: []sandbox.Namespace{"a"}}

// TestRoles: the table of docs/security.md.
func TestRoles(t *testing.T) {
	for role, may := range map[Role]string{
		RoleAdmin: "Anyone Read Use Change Observe Administer", RoleUser: "Anyone Read Use Change", RoleViewer: "Anyone Read",
		RoleSandbox: "Anyone Use", RoleController: "Anyone Read Observe Administer", RoleGateway: "Anyone Read Observe", RoleNode: "Anyone",
		"": "", "other": "",
	} {
		for name, need := range map[string]Permission{"None": None, "Anyone": Anyone, "Read": Read, "Use": Use, "Change": Change, "Observe": Observe, "Administer": Administer} {
			want := strings.Contains(" "+may+" ", " "+name+" ")
			if got := (Principal{Role: role}).May(need); got != want {
				t.Errorf("%q may %s: %v", role, name, got)
			}
		}
	}
	p := Principal{Namespaces: []sandbox.Namespace{"a", "b"}}
	if !p.In("b") || p.In("c") || p.In("") || (Principal{}).In("a") || !Local("uid:0").In("c") {
		t.Error("namespaces")
	}
}

// TestKeys: a key is as it was made, here and after a restart, until it is
// revoked. Nothing in the journal can be used as a key.
func TestKeys(t *testing.T) {
	n := newNode(t)
	text, k := n.create(inA)
	if !strings.HasPrefix(text, "ar_"+string(k.ID)+"_") || len(text) != len("ar_")+12+1+52 {
		t.Errorf("%q", text)
	}
	other, _ := n.create(KeySpec{Name: "ci", Role: RoleAdmin})
	for range 2 {
		p, err := n.Find(text)
		if err != nil || p.Name != "key:"+string(k.ID) || p.Role != RoleUser || !p.In("a") || p.In("b") || p.Until.Err() != nil {
			t.Errorf("%+v, %v", p, err)
		}
		if p, err := n.Find(other); err != nil || !p.In("b") || !p.May(Administer) {
			t.Errorf("%+v, %v", p, err)
		}
		if l := n.Keys(); len(l) != 2 || l[0].ID != k.ID {
			t.Errorf("%+v", l)
		}
		n.reopen()
	}
	kept, err := os.ReadFile(n.path)
	if err != nil {
		t.Fatal(err)
	}
	if secret := text[strings.LastIndexByte(text, '_')+1:]; bytes.Contains(kept, []byte(secret)) || !bytes.Contains(kept, []byte(k.ID)) {
		t.Error("the journal has the secret of a key, or not the key")
	}
	p, err := n.Find(text)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Revoke(k.ID); err != nil {
		t.Fatal(err)
	}
	if p.Until.Err() == nil {
		t.Error("who uses it is not told that it is revoked")
	}
	for range 2 {
		if _, err := n.Find(text); !errors.Is(err, ErrUnknown) {
			t.Errorf("revoked: %v", err)
		}
		if err := n.Revoke(k.ID); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("revoked twice: %v", err)
		}
		if _, err := n.Find(other); err != nil {
			t.Errorf("another key: %v", err)
		}
		n.reopen()
	}
}

// TestExpiry: a key ends when its time is up, also for a request that uses it
// at that moment.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		spec := inA
		spec.Lifetime = time.Hour
		text, k := n.create(spec)
		if !k.Expires.Equal(k.Created.Add(time.Hour)) {
			t.Errorf("%+v", k)
		}
		p, err := n.Find(text)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(59 * time.Minute)
		if _, err := n.Find(text); err != nil || p.Until.Err() != nil {
			t.Errorf("a minute before: %v, %v", err, p.Until.Err())
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if _, err := n.Find(text); !errors.Is(err, ErrExpired) || p.Until.Err() == nil {
			t.Errorf("its time is up: %v, %v", err, p.Until.Err())
		}
		n.reopen()
		if _, err := n.Find(text); !errors.Is(err, ErrExpired) || len(n.Keys()) != 1 {
			t.Errorf("after a restart: %v", err)
		}
	})
}

func TestBadKeys(t *testing.T) {
	n := newNode(t)
	a := []sandbox.Namespace{"a"}
	for says, spec := range map[string]KeySpec{
		"name":     {Name: "A B", Role: RoleUser, Namespaces: a},
		"role":     {Name: "x", Role: "root", Namespaces: a},
		"sandbox":  {Name: "x", Role: RoleSandbox, Namespaces: a}, // a role that no key has
		"none":     {Name: "x", Role: RoleViewer},
		"admin":    {Name: "x", Role: RoleAdmin, Namespaces: a},
		"more":     {Name: "x", Role: RoleUser, Namespaces: make([]sandbox.Namespace, 65)},
		"negative": {Name: "x", Role: RoleUser, Namespaces: a, Lifetime: -1},
	} {
		if says == "sandbox" {
			says = "role"
		}
		if _, _, err := n.Create(spec); !sandbox.HasCode(err, sandbox.CodeInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
	for _, bad := range [][]string{{""}, {"a", "B"}, {".."}, {"**"}, {"a/b"}, {"a\x00"}} {
		if _, err := ParseNamespaces(bad); !sandbox.HasCode(err, sandbox.CodeInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if l, err := ParseNamespaces([]string{"a", "*", "a"}); err != nil || len(l) != 2 {
		t.Errorf("%v, %v", l, err)
	}
	for _, bad := range []string{"", "abc", strings.Repeat("a", 13), "../../../etc", strings.Repeat("A", 12)} {
		if _, err := ParseKeyID(bad); err == nil {
			t.Errorf("%q is an id", bad)
		}
	}
	for range maxKeys {
		h := &held{Key: Key{ID: KeyID(random(keyIDLength))}, digest: digestOf(random(20))}
		n.hold(h)
	}
	if _, _, err := n.Create(inA); !sandbox.HasCode(err, sandbox.CodeConflict) {
		t.Errorf("one more than %d: %v", maxKeys, err)
	}
}

// TestExpiredKeys: expired keys do not keep new ones from being made, and are forgotten
// then, in the journal as well.
func TestExpiredKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		defer n.Close()
		spec := inA
		spec.Lifetime = time.Hour
		_, old := n.create(spec)
		for len(n.byID) < maxKeys {
			n.hold(&held{Key: Key{ID: KeyID(random(keyIDLength)), Expires: old.Expires}, digest: digestOf(random(20))})
		}
		if _, _, err := n.Create(inA); !sandbox.HasCode(err, sandbox.CodeConflict) {
			t.Errorf("before they have expired: %v", err)
		}
		time.Sleep(time.Hour)
		_, k, err := n.Create(inA)
		if err != nil {
			t.Fatal(err)
		}
		if left := n.Keys(); len(left) != 1 || left[0].ID != k.ID {
			t.Errorf("%d keys are left", len(left))
		}
		if err := n.db.View(func(tx *journal.Tx) error {
			_, found, err := keys.Get(tx, string(old.ID))
			if found {
				t.Errorf("key %s is in the journal", old.ID)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	})
}

// TestFirstKey: it is made once, even if it is revoked later.
func TestFirstKey(t *testing.T) {
	n := newNode(t)
	text, k, err := n.FirstKey()
	if err != nil {
		t.Fatal(err)
	}
	if p, err := n.Find(text); err != nil || p.Role != RoleAdmin {
		t.Errorf("%+v, %v", p, err)
	}
	if err := n.Revoke(k.ID); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if again, _, err := n.FirstKey(); again != "" || err != nil || len(n.Keys()) != 0 {
			t.Errorf("%q, %v", again, err)
		}
		n.reopen()
	}
}

// TestTokens: one per sandbox, the same after a restart, of this node alone.
func TestTokens(t *testing.T) {
	n, elsewhere := newNode(t), newNode(t)
	const id, sibling = sandbox.ID("abcdefghijklmnopqrst"), sandbox.ID("abcdefghijklmnopqrs2")
	token := n.Token(id)
	if token == n.Token(sibling) || !IsToken(token) || IsToken("ar_x") {
		t.Errorf("%q", token)
	}
	n.reopen()
	if got, err := n.Sandbox(token); err != nil || got != id {
		t.Errorf("%q, %v", got, err)
	}
	secret := token[strings.LastIndexByte(token, '_')+1:]
	for name, bad := range map[string]string{
		"another node's": elsewhere.Token(id), "another sandbox": tokenPrefix + string(sibling) + "_" + secret,
		"cut": token[:len(token)-1], "longer": token + "a", "empty": "", "prefix": tokenPrefix, "no secret": tokenPrefix + string(id),
		"empty secret": tokenPrefix + string(id) + "_", "upper case": strings.ToUpper(token), "a space": token + " ",
		"no id": n.Token(""), "a path": n.Token("../../../../etc/pass"), "NUL": n.Token("abcdefghijklmnopqrs\x00"),
		"a key": "ar_" + token[len(tokenPrefix):],
	} {
		if got, err := n.Sandbox(bad); err == nil || got != "" {
			t.Errorf("%s: %q", name, got)
		}
	}
	// A token is not a key, nor a key a token.
	text, _ := n.create(inA)
	if _, err := n.Find(token); !errors.Is(err, ErrUnknown) {
		t.Errorf("%v", err)
	}
	if _, err := n.Sandbox(text); err == nil {
		t.Error("a key is a token")
	}
}

// TestNothingToLearn: a refusal does not tell the reason, and keys are not
// compared byte by byte: every text of any length becomes a digest of one
// length, and is looked for by its whole digest.
func TestNothingToLearn(t *testing.T) {
	n := newNode(t)
	text, _ := n.create(inA)
	_, want := n.Find("")
	for i := range text {
		for _, bad := range []string{text[:i], text[:i] + "A" + text[i+1:], text[i+1:]} {
			if _, err := n.Find(bad); err != want {
				t.Errorf("%q: %v", bad, err)
			}
		}
	}
	for _, long := range []string{text + "a", text + strings.Repeat("a", 1<<20), strings.Repeat(text, 2)} {
		if _, err := n.Find(long); err != want {
			t.Errorf("%v", err)
		}
	}
	for d := range n.byDigest {
		if d != digestOf(text) || len(d) != 32 {
			t.Error("keys are found by something else than the digest of all of their text")
		}
	}
}

// TestDamage: a journal that was tampered with is refused.
func TestDamage(t *testing.T) {
	for name, damage := range map[string]func(*journal.Tx) error{
		"a short digest": func(tx *journal.Tx) error { return keys.Put(tx, "x", record{Digest: "00"}) },
		"no digest":      func(tx *journal.Tx) error { return keys.Put(tx, "x", record{}) },
		"no hex":         func(tx *journal.Tx) error { return keys.Put(tx, "x", record{Digest: strings.Repeat("x", 64)}) },
		"a long digest":  func(tx *journal.Tx) error { return keys.Put(tx, "x", record{Digest: strings.Repeat("0", 66)}) },
		"an empty secret": func(tx *journal.Tx) error {
			return secrets.Put(tx, tokenSecret, "")
		},
		"a short secret": func(tx *journal.Tx) error { return secrets.Put(tx, tokenSecret, "00") },
	} {
		t.Run(name, func(t *testing.T) {
			db, err := journal.Open(filepath.Join(t.TempDir(), "journal"))
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if err := db.Update(damage); err != nil {
				t.Fatal(err)
			}
			if s, err := Open(db); err == nil {
				s.Close()
				t.Error("it was opened")
			}
		})
	}
}

// FuzzCredentials: of all texts, only the given keys and tokens let a client in.
func FuzzCredentials(f *testing.F) {
	db, err := journal.Open(filepath.Join(f.TempDir(), "journal"))
	if err != nil {
		f.Fatal(err)
	}
	s, err := Open(db)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Close(); _ = db.Close() })
	key, _, err := s.Create(inA)
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{"", "ar_", "ars_", "ars__", "ar_a_b", "ars_abcdefghijklmnopqrst_", "ars_" + strings.Repeat("_", 100), "\x00", "\xff"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if p, err := s.Find(text); err == nil && text != key {
			t.Errorf("%q is %+v", text, p)
		}
		if id, err := s.Sandbox(text); err == nil && text != s.Token(id) {
			t.Errorf("%q is for %s", text, id)
		}
	})
}
