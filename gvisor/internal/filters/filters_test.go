package filters

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"

	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap"
	"gvisor.dev/gvisor/runsc/boot/filter"
)

// TestStored: the embedded filter is the one that this version of gVisor compiles.
func TestStored(t *testing.T) {
	p, err := compile("systrap")
	if err != nil {
		t.Fatal(err)
	}
	want, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	if os.Getenv("UPDATE_FILTERS") != "" {
		if err := os.WriteFile("systrap.json", want, 0o600); err != nil {
			t.Fatal(err)
		}
		stored = want
	}
	if !bytes.Equal(stored, want) {
		t.Error("systrap.json is of another version: UPDATE_FILTERS=1 go test ./internal/filters")
	}
	if err := Use(); err != nil {
		t.Fatal(err)
	}
	got, ok := filter.GetPrecompiled(p.Name)
	if !ok || len(got.Bytecode32) != len(p.Bytecode32) {
		t.Errorf("gVisor does not find the filter %q", p.Name)
	}
}
