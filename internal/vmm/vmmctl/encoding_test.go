package vmmctl

import (
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/vmm/livefork"
)

// TestEncodingStays: messages to a vmm process that another version of the
// daemon started have not changed.
func TestEncodingStays(t *testing.T) {
	b, err := os.ReadFile("testdata/messages.hex")
	if err != nil {
		t.Fatal(err)
	}
	runs := []extent.Run{{Start: 4096, Length: 8192}, {Start: 1 << 30, Length: 4096}}
	var got []string
	for _, m := range append(messages(), &Save{ID: 9, Memory: runs, Disks: [][]extent.Run{runs, nil}}) {
		got = append(got, hex.EncodeToString(Marshal(m)))
	}
	saved := Saved{
		Memory: Change{Runs: runs[:1], Zeros: runs[1:]}, Disks: []Change{{Zeros: runs[:1]}, {Runs: runs}},
		Stats: livefork.Stats{Pause: 1, Waits: 2, MedianWait: 3, P99Wait: 4, LongestWait: 5, Copied: 6, WhyCopiedInPause: "why"},
	}
	got = append(got, hex.EncodeToString(Touched{Written: runs[:1], Read: runs[1:]}.Marshal()), hex.EncodeToString(saved.Marshal()),
		hex.EncodeToString(Hello{Protocol: 3}.Marshal()))
	want := strings.Fields(string(b))
	if len(got) != len(want) {
		t.Fatalf("%d messages, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("message %d is encoded as\n%s, want\n%s", i, got[i], want[i])
		}
	}
}
