package pick

import (
	"testing"

	"agentrun.dev/internal/engine/gvisor"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/host/doctor"
)

func TestKinds(t *testing.T) {
	var k Kind
	for _, good := range []Kind{Auto, MicroVM, GVisor} {
		if err := k.Set(string(good)); err != nil || k != good || k.String() != string(good) {
			t.Errorf("%s: %s, %v", good, k, err)
		}
	}
	for _, bad := range []string{"", "docker", "MicroVM"} {
		if err := k.Set(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	for name, want := range map[string]Kind{microvm.Name: MicroVM, gvisor.Name: GVisor} {
		if got, err := Of(name); err != nil || got != want {
			t.Errorf("%s is of %s, %v", name, got, err)
		}
	}
	if _, err := Of("other/1"); err == nil {
		t.Error("an engine that nobody knows")
	}
	if _, err := Open(Auto, Config{}); err == nil {
		t.Error("auto was opened: it must be chosen first")
	}
}

// TestChoose: an explicit kind is kept. Auto follows the host's KVM.
func TestChoose(t *testing.T) {
	for _, k := range Kinds {
		if got, why := Choose(k); got != k || why == "" {
			t.Errorf("%s became %s (%s)", k, got, why)
		}
	}
	want := GVisor
	if hardware, _ := doctor.HardwareKVM(); hardware {
		want = MicroVM
	}
	if got, why := Choose(Auto); got != want || why == "" {
		t.Errorf("auto is %s (%s), not %s", got, why, want)
	}
}
