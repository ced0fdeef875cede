package snapshot

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/storage/layer"
)

func TestID(t *testing.T) {
	id := ID{1, 2, 0xff}
	got, err := ParseID(id.String())
	if err != nil || got != id {
		t.Errorf("%s becomes %s, %v", id, got, err)
	}
	_, err = ParseID("../x")
	wantError(t, err, "snapshot id", "../x")
}

func TestManifestRoundTrip(t *testing.T) {
	b, err := encode(full())
	if err != nil {
		t.Fatal(err)
	}
	m, err := decode(b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(m, full()) {
		t.Errorf("%+v, want %+v", m, full())
	}
	stack := full().Disks[0].Stack
	if got := StackOf(stack.Layer()); !reflect.DeepEqual(got, stack) {
		t.Errorf("%+v, want %+v", got, stack)
	}
	if got := m.Layers(); len(got) != 2 || got[0].Digest != (layer.Digest{1}) || got[1].Size != page {
		t.Errorf("layers %v", got)
	}
}

// TestManifestStays: snapshots of older versions are still read, and the same
// content keeps the same id.
func TestManifestStays(t *testing.T) {
	b, err := os.ReadFile("testdata/manifest.json")
	if err != nil {
		t.Fatal(err)
	}
	m, err := decode(b)
	if err != nil || !reflect.DeepEqual(m, full()) {
		t.Errorf("%+v, %v; want %+v", m, err, full())
	}
	if got, err := encode(full()); err != nil || !bytes.Equal(got, b) {
		t.Errorf("%s, %v; want %s", got, err, b)
	}
}

func TestValidate(t *testing.T) {
	other := layer.Ref{Digest: layer.Digest{1}, Size: 8 * page}
	for _, c := range []struct {
		field string
		spoil func(*Manifest)
	}{
		{"private", func(m *Manifest) { m.Format = FormatPrivate }},
		{"format: 3", func(m *Manifest) { m.Format = 3 }},
		{"engine: \"other/1\"", func(m *Manifest) { m.Engine = "other/1" }},
		{"created", func(m *Manifest) { m.Created = time.Time{} }},
		{"created", func(m *Manifest) { m.Created = m.Created.Add(1) }},
		{"created", func(m *Manifest) { m.Created = m.Created.In(time.FixedZone("x", 3600)) }},
		{"parent: snapshot id", func(m *Manifest) { m.Parent = "me" }},
		{"kernel", func(m *Manifest) { m.Kernel = "" }},
		{"kernel", func(m *Manifest) { m.Kernel = strings.Repeat("AB", 32) }},
		{"cpu: profile", func(m *Manifest) { m.CPU.Profile = "" }},
		{"cpu: vendor", func(m *Manifest) { m.CPU.Vendor = "a b" }},
		{"cpu: family", func(m *Manifest) { m.CPU.Family = -1 }},
		{"stepping 16", func(m *Manifest) { m.CPU.Stepping = 16 }},
		{"model 256", func(m *Manifest) { m.CPU.Model = 256 }},
		{"cpu: features", func(m *Manifest) { m.CPU.Features = map[string]uint32{"": 1} }},
		{"cpu: features: 65", func(m *Manifest) {
			m.CPU.Features = map[string]uint32{}
			for i := range uint32(65) {
				m.CPU.Features[fmt.Sprint(i)] = i
			}
		}},
		{"tsc_khz", func(m *Manifest) { m.TSCKHz = 0 }},
		{"tsc_khz", func(m *Manifest) { m.TSCKHz = math.MaxUint64 }},
		{"vcpus", func(m *Manifest) { m.VCPUs = 0 }},
		{"vcpus", func(m *Manifest) { m.VCPUs = 257 }},
		{"memory: stack of 0", func(m *Manifest) { m.Memory = Stack{} }},
		{"memory: extent 0", func(m *Manifest) { m.Memory.Extents[0].Layer = 7 }},
		{"disks[1].image", func(m *Manifest) { m.Disks[1].Stack.Size = 5 }},
		{"elsewhere", func(m *Manifest) { m.Disks[1].Stack = stack(other) }},
		{"disks[0].id", func(m *Manifest) { m.Disks[0].ID = strings.Repeat("x", 21) }},
		{"disks[1].id", func(m *Manifest) { m.Disks[1].ID = "a\n" }},
		{"disks, nets", func(m *Manifest) { m.Disks = make([]Disk, 25) }},
		{"nets[0].mac", func(m *Manifest) { m.Nets[0].MAC = "02:00:00:00:00:0G" }},
		{"nets[0].mac", func(m *Manifest) { m.Nets[0].MAC = "02-00-00-00-00-01" }},
		{"nets[0].mac", func(m *Manifest) { m.Nets[0].MAC = "03:00:00:00:00:01" }},
		{"nets[0].mac", func(m *Manifest) { m.Nets[0].MAC = "02:00:00:00:00:00:00:01" }},
		{"nets[0].mtu", func(m *Manifest) { m.Nets[0].MTU = 67 }},
		{"nets[0].mtu", func(m *Manifest) { m.Nets[0].MTU = 1 << 16 }},
		{"nets[0].address", func(m *Manifest) { m.Nets[0].Address = "" }},
		{"nets[0].address", func(m *Manifest) { m.Nets[0].Address = "10.0.2.15" }},
		{"nets[0].address", func(m *Manifest) { m.Nets[0].Address = "10.0.2.15/0" }},
		{"nets[0].address", func(m *Manifest) { m.Nets[0].Address = "fd00::1/64" }},
		{"nets[0].gateway", func(m *Manifest) { m.Nets[0].Gateway = "fd00::1" }},
		{"nets[0].address6", func(m *Manifest) { m.Nets[0].Address6 = "10.0.2.15/24" }},
		{"nets[0].address6", func(m *Manifest) { m.Nets[0].Address6 = "fd00::2" }},
		{"nets[0].address6", func(m *Manifest) { m.Nets[0].Address6 = "fd00:0::2/64" }},
		{"nets[0].address6", func(m *Manifest) { m.Nets[0].Address6 = "::ffff:10.0.2.15/120" }},
		{"nets[0].gateway6", func(m *Manifest) { m.Nets[0].Gateway6 = "fd00::1" }},
		{"nets[0].gateway6", func(m *Manifest) { m.Nets[0].Address6, m.Nets[0].Gateway6 = "fd00::2/64", "fe80::1%eth0" }},
		{"nets[0].dns", func(m *Manifest) { m.Nets[0].DNS = []string{"fd00::1%eth0"} }},
		{"nets[0].gateway", func(m *Manifest) { m.Nets[0].Gateway = "10.0.2.2 gw" }},
		{"nets[0].dns", func(m *Manifest) { m.Nets[0].DNS = []string{"dns.example"} }},
		{"nets[0].dns", func(m *Manifest) { m.Nets[0].DNS = make([]string, 4) }},
		{"hostname", func(m *Manifest) { m.Hostname = "a.b" }},
		{"hostname", func(m *Manifest) { m.Hostname = strings.Repeat("x", 64) }},
		{"labels: the key", func(m *Manifest) { m.Labels = map[string]string{"": "x"} }},
		{"labels: the key", func(m *Manifest) { m.Labels = map[string]string{"ä": "x"} }},
		{"labels: the value", func(m *Manifest) { m.Labels = map[string]string{"a": "x\x00"} }},
		{"labels: the value", func(m *Manifest) { m.Labels = map[string]string{"a": "\xff"} }},
		{"labels: 65", func(m *Manifest) {
			for i := range 63 {
				m.Labels[fmt.Sprint(i)] = ""
			}
		}},
		{"state: 0 bytes", func(m *Manifest) { m.State.Size = 0 }},
		{"state", func(m *Manifest) { m.State.Size = MaxState + 1 }},
	} {
		m := full()
		c.spoil(&m)
		wantError(t, m.Validate(), c.field)
		if _, err := encode(m); err == nil {
			t.Errorf("%s: encoded", c.field)
		}
		// The same as a forged file, with a valid checksum.
		if b, err := checksummed(m); err == nil {
			if _, err := decode(b); err == nil {
				t.Errorf("%s: decoded", c.field)
			}
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	good, err := encode(full())
	if err != nil {
		t.Fatal(err)
	}
	text := string(good)
	for _, c := range []struct{ name, text, say string }{
		{"nothing", "", "damaged"},
		{"another file", "[]", "damaged"},
		{"null", "null", "format: 0"},
		{"too long", strings.Repeat(" ", MaxManifest+1), "more than 1048576"},
		{"trailing data", text + "x", "damaged"},
		{"trailing newline", text + "\n", "canonical"},
		{"no newline", strings.TrimSpace(text), "canonical"},
		{"unknown field", strings.Replace(text, `"vcpus"`, `"x":1,"vcpus"`, 1), `unknown field "x"`},
		{"other spelling", strings.Replace(text, `"vcpus"`, `"vCPUs"`, 1), "canonical"},
		{"field twice", strings.Replace(text, `"vcpus":2`, `"vcpus":1,"vcpus":2`, 1), "canonical"},
		{"space", strings.Replace(text, `"vcpus":2`, `"vcpus": 2`, 1), "canonical"},
		{"escape", strings.Replace(text, "box-1", `box\u002d1`, 1), "canonical"},
		{"empty list", strings.Replace(text, `"hostname"`, `"parent":"","hostname"`, 1), "canonical"},
		{"other time zone", strings.Replace(text, "07Z", "07+00:00", 1), "canonical"},
		{"wrong type", strings.Replace(text, `"vcpus":2`, `"vcpus":"2"`, 1), "vcpus"},
		{"fraction", strings.Replace(text, `"vcpus":2`, `"vcpus":2.5`, 1), "vcpus"},
		{"overflow", strings.Replace(text, `"tsc_khz":2400000`, `"tsc_khz":99999999999999999999`, 1), "tsc_khz"},
		{"digest in capitals", strings.Replace(text, `"checksum":"`, `"checksum":"F`, 1), "digest"},
		{"changed value", strings.Replace(text, "box-1", "box-2", 1), "checksum"},
		{"later format", strings.Replace(text, `"format":1`, `"format":3,"new":[]`, 1), "format: 3, this agentrun reads 1 and 2: use the version that made"},
		{"other engine", strings.Replace(text, Engine, "other/1", 1), `engine: "other/1", this agentrun restores "microvm/1"`},
		{"later engine", strings.Replace(text, Engine, "microvm/2", 1), "or make a new one"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.text == text {
				t.Fatal("the manifest was not changed")
			}
			_, err := decode([]byte(c.text))
			wantError(t, err, c.say)
		})
	}
}

// TestManifestDamage flips each bit and cuts at each place.
func TestManifestDamage(t *testing.T) {
	good, err := encode(full())
	if err != nil {
		t.Fatal(err)
	}
	for i := range good {
		if _, err := decode(good[:i]); err == nil {
			t.Fatalf("cut off at %d: accepted", i)
		}
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			if _, err := decode(bad); err == nil {
				t.Fatalf("bit %d of byte %d flipped: accepted\n%s", bit, i, bad)
			}
		}
	}
}

// TestLargestManifest: a manifest whose parts reach their limits fits into the
// limit of the file.
func TestLargestManifest(t *testing.T) {
	m := full()
	var stack layer.Stack
	stack.Size = layer.MaxSize
	for i := range layer.MaxLayers {
		stack.Layers = append(stack.Layers, layer.Ref{Digest: layer.Digest{byte(i)}, Size: layer.MaxSize})
	}
	for i := range layer.MaxExtents {
		at := layer.MaxSize - uint64(2*(layer.MaxExtents-i))*page
		stack.Extents = append(stack.Extents, layer.Extent{Start: at, Length: page, Layer: i % layer.MaxLayers, Offset: at})
	}
	m.Memory, m.Disks = StackOf(stack), nil
	for range maxDevices {
		m.Disks = append(m.Disks, Disk{ID: strings.Repeat("x", maxDiskID), Stack: StackOf(stack)})
	}
	m.Labels = map[string]string{}
	for i := range maxLabels {
		m.Labels[fmt.Sprintf("%0*d", maxLabel, i)] = strings.Repeat("\"", maxLabel)
	}
	b, err := encode(m)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", len(b))
	if _, err := decode(b); err != nil {
		t.Error(err)
	}
}

func FuzzManifest(f *testing.F) {
	good, err := encode(full())
	if err != nil {
		f.Fatal(err)
	}
	small := full()
	small.Parent, small.Disks, small.Nets, small.Labels, small.Hostname = "", nil, nil, nil, ""
	least, err := encode(small)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(least)
	f.Add([]byte(`{"format":1,"engine":"microvm/1"}`))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, b []byte) {
		check := func(b []byte) {
			m, err := decode(b)
			if err != nil {
				return
			}
			again, err := encode(m)
			if err != nil || !bytes.Equal(again, b) {
				t.Fatalf("accepted %q, which becomes %q, %v", b, again, err)
			}
		}
		check(b)
		// With a valid checksum the fuzzer gets further.
		var m Manifest
		if json.Unmarshal(b, &m) != nil {
			return
		}
		if sealed, err := checksummed(m); err == nil {
			check(sealed)
		}
	})
}
