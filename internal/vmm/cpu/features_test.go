package cpu

import (
	"slices"
	"testing"

	"agentrun.dev/internal/vmm/kvm"
)

func TestMissingFeatures(t *testing.T) {
	want := map[string]uint32{"7.0.ebx": 1<<5 | 1<<16, "1.0.ecx": 1 << 28, "9.9.eax": 1 << 31, "d.0.eax": 3}
	for name, c := range map[string]struct {
		have map[string]uint32
		want []string
	}{
		"the same": {want, nil},
		"more":     {map[string]uint32{"7.0.ebx": 1<<32 - 1, "1.0.ecx": 1<<32 - 1, "9.9.eax": 1<<32 - 1, "d.0.eax": 7, "x": 1}, nil},
		"less":     {map[string]uint32{"7.0.ebx": 1 << 5, "d.0.eax": 1}, []string{"avx", "avx512f", "bit 31 of CPUID 9.9.eax", "bit 1 of CPUID d.0.eax"}},
	} {
		if got := MissingFeatures(want, c.have); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestFeatures: the features of this host are listed, without those that the
// profile hides.
func TestFeatures(t *testing.T) {
	sys, err := kvm.Open()
	if err != nil {
		t.Fatalf("this test needs a /dev/kvm of any kind (make test runs it in the testbed where there is none): %v", err)
	}
	defer func() { _ = sys.Close() }()
	f, err := HostV1.Features(sys)
	if err != nil {
		t.Fatal(err)
	}
	if f["1.0.edx"] == 0 || f["1.0.ecx"]&featHypervisor == 0 || f["1.0.ecx"]&featMonitor != 0 {
		t.Errorf("%x", f)
	}
	if missing := MissingFeatures(f, f); len(missing) > 0 {
		t.Errorf("missing: %q", missing)
	}
	if _, err := Profile("none").Features(sys); err == nil {
		t.Error("an unknown profile has features")
	}
}
