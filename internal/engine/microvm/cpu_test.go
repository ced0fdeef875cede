package microvm

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/snapshot"
)

// TestOtherCPU: forks and spares refuse a snapshot from another processor, and name
// the difference. A snapshot from a processor with fewer features is accepted.
func TestOtherCPU(t *testing.T) {
	e := jailedEngine(t, openJail(t).Jail, residentFolder(t))
	t.Cleanup(func() { _ = e.Close() })
	host, err := (&hostCPU{}).get()
	if err != nil {
		t.Fatal(err)
	}
	spare := ^host.Features["7.0.ecx"] & -^host.Features["7.0.ecx"] // the lowest bit that is not set
	for name, c := range map[string]struct {
		doctor func(*snapshot.CPU)
		want   string // empty: it fits
	}{
		"the same":         {func(*snapshot.CPU) {}, ""},
		"an older one":     {func(c *snapshot.CPU) { c.Features = map[string]uint32{"1.0.ecx": 0} }, ""},
		"no features told": {func(c *snapshot.CPU) { c.Features = nil }, ""},
		"a stepping":       {func(c *snapshot.CPU) { c.Stepping ^= 1 }, ""},
		"a vendor":         {func(c *snapshot.CPU) { c.Vendor = "Zhaoxin" }, "its processor was Zhaoxin family"},
		"a family":         {func(c *snapshot.CPU) { c.Family ^= 1 }, "this host's is " + host.Vendor},
		"a model":          {func(c *snapshot.CPU) { c.Model ^= 1 }, "model"},
		"a profile":        {func(c *snapshot.CPU) { c.Profile = "host-v9" }, `"host-v9"`},
		"a known feature":  {func(c *snapshot.CPU) { c.Features = map[string]uint32{"80000001.0.ecx": 1 << 16} }, "lacks: fma4"},
		"a feature": {func(c *snapshot.CPU) {
			c.Features = map[string]uint32{"7.0.ecx": spare, "77.0.eax": 1 << 3}
		}, "bit 3 of CPUID 77.0.eax"},
	} {
		t.Run(name, func(t *testing.T) {
			snap := doctoredSnapshot(t, filepath.Join(t.TempDir(), "snapshot"), c.doctor)
			_, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
			kept, keepErr := e.KeepSpares(snap, 0)
			fitErr := e.Fits(snap.Manifest())
			if c.want == "" {
				if !strings.Contains(err.Error(), noState) || keepErr != nil || fitErr != nil {
					t.Errorf("%v; spares: %v; fits: %v", err, keepErr, fitErr)
				}
				if err := kept.Close(); err != nil {
					t.Error(err)
				}
				return
			}
			for _, err := range []error{err, keepErr, fitErr} {
				if !errors.Is(err, engine.ErrMismatch) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "make it anew") {
					t.Errorf("refused with %v", err)
				}
			}
		})
	}
}
