package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// writeEnd writes that a sandbox has ended.
func (m *Manager) writeEnd(t *testing.T, n sandbox.Namespace, name string, at time.Time, detail string) {
	t.Helper()
	s := sandbox.Sandbox{Key: sandbox.Key{Namespace: n, Name: sandbox.Name(name)}, ID: sandbox.NewID(), Created: at}
	s.End(sandbox.ReasonCrashed, detail, at)
	var written func()
	if err := m.db.Update(func(tx *journal.Tx) (err error) {
		written, err = m.write(tx, &s)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	written()
}

// TestHistoryIsBounded: a namespace has so many sandboxes that have ended, and so many
// bytes of them; the last are kept, and those of others are not touched. A restart
// changes nothing.
func TestHistoryIsBounded(t *testing.T) {
	dir := t.TempDir()
	m := daemon(t, dir, nodetest.NewHost(t))
	defer func() { _ = m.Close() }()
	at := time.Now()
	m.writeEnd(t, "quiet", "mine", at, "")
	const more = 20
	for i := range historyRecords + more {
		m.writeEnd(t, "many", fmt.Sprintf("s%d", i), at.Add(time.Duration(i)*time.Second), "")
	}
	const size = 256 << 10
	for i := range historyBytes/size + more {
		m.writeEnd(t, "large", fmt.Sprintf("s%d", i), at.Add(time.Duration(i)*time.Second), strings.Repeat("x", size))
	}
	for range 2 {
		count, bytes := map[sandbox.Namespace]int{}, map[sandbox.Namespace]int{}
		if err := m.db.View(func(tx *journal.Tx) error {
			return ended.Each(tx, "", func(key string, s sandbox.Sandbox) error {
				count[s.Namespace]++
				bytes[s.Namespace] += ended.Size(tx, key)
				return nil
			})
		}); err != nil {
			t.Fatal(err)
		}
		if count["quiet"] != 1 || count["many"] != historyRecords || bytes["large"] > historyBytes || count["large"] < historyBytes/size-1 {
			t.Errorf("%v records, %v bytes", count, bytes)
		}
		for k, code := range map[sandbox.Key]sandbox.Code{
			{Namespace: "quiet", Name: "mine"}: sandbox.CodeEnded, {Namespace: "many", Name: "s0"}: sandbox.CodeNotFound,
			{Namespace: "many", Name: "s20"}: sandbox.CodeEnded, {Namespace: "large", Name: "s0"}: sandbox.CodeNotFound,
		} {
			if _, err := m.Sandbox(t.Context(), k); !sandbox.HasCode(err, code) {
				t.Errorf("%s: %.100v", k, err)
			}
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, nodetest.NewHost(t))
	}
}
