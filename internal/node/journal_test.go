package node

import (
	"bytes"
	"encoding"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// TestReadsJournalOfBefore: testdata/journal was written, from recorded, by the
// program of commit 37e14ab, whose types had the limits, the memory and the sizes of
// engines and snapshots in them. Every field is read as it was written, and this
// program writes the same.
func TestReadsJournalOfBefore(t *testing.T) {
	db, err := journal.Open(copyOfJournal(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	want := recorded()
	err = db.View(func(tx *journal.Tx) error {
		same(t, tx, templates, want.Templates)
		same(t, tx, builds, want.Builds)
		same(t, tx, pools, want.Pools)
		past := map[string]sandbox.Sandbox{}
		for id, s := range want.Sandboxes {
			if s.State == sandbox.Ended {
				past[endedKey(s)] = s
				delete(want.Sandboxes, id)
			}
		}
		same(t, tx, sandboxes, want.Sandboxes)
		same(t, tx, ended, past)
		same(t, tx, forks, want.Forks)
		same(t, tx, checkpoints, want.Checkpoints)
		same(t, tx, quotas, want.Quotas)
		same(t, tx, answers, want.Answers)
		times := map[string]string{}
		for key, a := range want.Answers {
			times[journal.TimeKey(a.Time, key)] = key
		}
		same(t, tx, answersByTime, times)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestAdoptsJournalOfBefore: a daemon starts with that journal, and ends those
// sandboxes only whose machines are gone.
func TestAdoptsJournalOfBefore(t *testing.T) {
	m := daemon(t, filepath.Dir(copyOfJournal(t)), nodetest.NewHost(t), func(c *Config) {
		c.Boot, c.Builder = "boot-1", &builder{gate: make(chan struct{})} // a build counts, too
	})
	defer func() { _ = m.Close() }()
	<-m.adopted
	list, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: "team", Page: sandbox.Page{}, Ended: true})
	if err != nil {
		t.Fatal(err)
	}
	got := map[sandbox.Name]sandbox.State{}
	for _, s := range list {
		got[s.Name] = s.State
	}
	want := map[sandbox.Name]sandbox.State{ // the one that was starting is gone
		"running": sandbox.Ended, "paused": sandbox.Ended, "hibernating": sandbox.Ended,
		"hibernated": sandbox.Hibernated, "resuming": sandbox.Hibernated, "ended": sandbox.Ended,
	}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	q, err := m.QuotaOf(t.Context(), "team")
	if err != nil || q.Quota != recorded().Quotas["team"] || q.UsedSandboxes != 2 || q.UsedStorage != 3*(11<<20) {
		t.Errorf("%+v, %v", q, err)
	}
}

func copyOfJournal(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "journal"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "journal")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// same compares a collection with the objects that were written to it.
func same[T any](t *testing.T, tx *journal.Tx, c journal.Collection[T], want map[string]T) {
	t.Helper()
	got := map[string]T{}
	if err := c.Each(tx, "", func(key string, object T) error {
		if v, ok := any(&object).(journal.Versioned); ok {
			v.SetResourceVersion(0) // it has one
		}
		got[key] = object
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want))) {
		t.Errorf("%s: %v, want %v", c, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
	}
	for key := range want {
		raw, _, err := journal.Collection[json.RawMessage](c).Get(tx, key)
		if err != nil {
			t.Fatal(err)
		}
		if now, err := json.Marshal(want[key]); err != nil || !bytes.Equal(now, raw) {
			t.Errorf("%s %s: %v\n%s is written, was\n%s", c, key, err, now, raw)
		}
		if !reflect.DeepEqual(got[key], want[key]) {
			t.Errorf("%s %s:\n%+v, want\n%+v", c, key, got[key], want[key])
		}
	}
}

// TestStoredFieldsHaveNames: whoever renames a field does not lose what journals
// have of it.
func TestStoredFieldsHaveNames(t *testing.T) {
	seen := map[reflect.Type]bool{}
	// A type that is written as text has no fields there.
	text := reflect.TypeFor[encoding.TextMarshaler]()
	var check func(reflect.Type)
	check = func(of reflect.Type) {
		if of.Implements(text) {
			return
		}
		switch of.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
			check(of.Elem())
		case reflect.Struct:
			if seen[of] {
				return
			}
			seen[of] = true
			for f := range of.Fields() {
				name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				if name == "" && !f.Anonymous {
					t.Errorf("%s.%s has no name for the journal", of, f.Name)
				}
				check(f.Type)
			}
		}
	}
	check(reflect.TypeFor[objects]())
	check(reflect.TypeFor[access.Key]())
	check(reflect.TypeFor[secretRecord]())
}
