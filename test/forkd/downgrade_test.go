package forkd

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/node/journal"
	"go.etcd.io/bbolt"
)

// TestNewerJournal: a daemon does not start on the journal of a newer one. Its error
// names the next step. It does not touch the sandboxes: the newer daemon finds them all.
func TestNewerJournal(t *testing.T) {
	n := newNode(t)
	n.up()
	n.template(pythonImage(t))
	if _, err := n.Client.CreateSandbox(t.Context(), rest.SandboxCreate{Name: "a", Pool: "pool"}, ""); err != nil {
		t.Fatal(err)
	}
	value, err := n.mark(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	n.down()
	before, err := n.entries("machines")
	if err != nil || len(before) != 1 {
		t.Fatal(before, err)
	}
	setSchema(t, n, journal.Schema+1)
	out, err := n.command("up").CombinedOutput()
	if err == nil {
		t.Error("it has started")
	}
	for _, part := range []string{"written by a newer version", fmt.Sprintf("schema %d", journal.Schema+1), fmt.Sprintf("this one knows %d", journal.Schema), "Start the version that wrote it"} {
		if !strings.Contains(string(out), part) {
			t.Errorf("it does not say %q: %s", part, out)
		}
	}
	setSchema(t, n, journal.Schema)
	n.up()
	u := &user{node: n, holds: map[string]string{"a": value}}
	if err := u.check(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	if _, err := n.Client.Kill(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	n.end(new(traces))
}

// setSchema plays a daemon that writes a journal with this schema.
func setSchema(t *testing.T, n *node, schema uint32) {
	t.Helper()
	db, err := bbolt.Open(filepath.Join(n.State, "forkd", "journal"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte("meta")).Put([]byte("schema"), binary.LittleEndian.AppendUint32(nil, schema))
	}); err != nil {
		t.Error(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}
