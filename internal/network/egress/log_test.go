package egress

import (
	"strings"
	"testing"
)

// TestSince: entries are returned from a number on. If those are gone, the oldest
// kept entries are returned, and if the number comes from another log, the first
// ones.
func TestSince(t *testing.T) {
	r := &ring{size: 3}
	seqs := func(after uint64, limit int) (out []uint64) {
		for _, e := range r.since(after, limit) {
			out = append(out, e.Seq)
		}
		return out
	}
	if got := seqs(0, 9); got != nil {
		t.Errorf("an empty log has %v", got)
	}
	for range 5 {
		r.add(Entry{Outcome: Closed})
	}
	for _, c := range []struct {
		after       uint64
		limit       int
		first, last uint64 // 0: no entries
	}{
		{0, 9, 3, 5}, {2, 9, 3, 5}, {3, 9, 4, 5}, {3, 1, 4, 4}, {5, 9, 0, 0}, {6, 9, 3, 5}, {1 << 63, 9, 3, 5},
	} {
		got := seqs(c.after, c.limit)
		if c.first == 0 {
			if got != nil {
				t.Errorf("after %d: %v", c.after, got)
			}
			continue
		}
		if len(got) == 0 || got[0] != c.first || got[len(got)-1] != c.last {
			t.Errorf("after %d, %d at most: %v", c.after, c.limit, got)
		}
	}
}

// TestLongReasons: no name or text of a sandbox makes an entry of its log long.
func TestLongReasons(t *testing.T) {
	r := ring{size: 4}
	r.add(Entry{Reason: strings.Repeat("x", 1<<20)})
	if n := len(r.since(0, 1)[0].Reason); n > maxReason {
		t.Errorf("a reason of %d bytes", n)
	}
}
