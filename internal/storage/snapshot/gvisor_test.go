package snapshot

import (
	"strings"
	"testing"
)

// onGVisor is a manifest of a sandbox on gVisor.
func onGVisor() Manifest {
	m := full()
	m.Engine, m.Kernel, m.TSCKHz, m.Session = EngineGVisor, "", 0, nil
	m.Disks = m.Disks[:1]
	m.GVisor = &GVisor{
		Helper: strings.Repeat("ab", 32), Platform: "systrap", CPUFeatures: []string{"avx", "sse2"}, Disk: 1 << 20,
		Pages: m.Memory.Layers[0],
	}
	m.Memory = Stack{Size: 128 << 20}
	return m
}

func TestGVisorManifest(t *testing.T) {
	m := onGVisor()
	b, err := encode(m)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decode(b)
	if err != nil || got.GVisor == nil || got.GVisor.Pages != m.GVisor.Pages {
		t.Fatalf("%+v, %v", got.GVisor, err)
	}
	found := false
	for _, ref := range got.Layers() {
		found = found || Blob(ref) == m.GVisor.Pages
	}
	if !found {
		t.Error("the pages are not among the layers")
	}
	for _, c := range []struct {
		say   string
		spoil func(*Manifest)
	}{
		{"gvisor: missing", func(m *Manifest) { m.GVisor = nil }},
		{"these are of microVMs", func(m *Manifest) { m.Kernel = strings.Repeat("ab", 32) }},
		{"these are of microVMs", func(m *Manifest) { m.TSCKHz = 1 }},
		{"these are of microVMs", func(m *Manifest) { m.Memory.Layers = []Blob{m.GVisor.Pages} }},
		{"gvisor: helper", func(m *Manifest) { m.GVisor.Helper = "x" }},
		{"gvisor: platform", func(m *Manifest) { m.GVisor.Platform = "" }},
		{"gvisor: cpu_features", func(m *Manifest) { m.GVisor.CPUFeatures = []string{"a b"} }},
		{"gvisor: cpu_features", func(m *Manifest) { m.GVisor.CPUFeatures = make([]string, maxCPUFeatures+1) }},
		{"gvisor: pages", func(m *Manifest) { m.GVisor.Pages.Size = 5 }},
		{"no snapshot of that engine", func(m *Manifest) {
			g := m.GVisor
			*m = full()
			m.GVisor = g
		}},
	} {
		m := onGVisor()
		c.spoil(&m)
		wantError(t, m.Validate(), c.say)
	}
}
