package vmmctl

import (
	"bytes"
	"errors"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
)

func stack() layer.Stack {
	return layer.Stack{
		Size:    1 << 20,
		Layers:  []layer.Ref{{Digest: layer.Digest{1}, Size: 8 << 10}, {Digest: layer.Digest{2}, Size: 4 << 10}},
		Extents: []layer.Extent{{Start: 0, Length: 4 << 10, Layer: 1}, {Start: 64 << 10, Length: 8 << 10, Layer: 0}},
	}
}

func devices() Devices {
	stack := stack()
	return Devices{
		Listen: true, ReadyPort: 1024,
		Disks: []Disk{{ReadOnly: true, ID: "root"}, {}, {ID: "data", Stack: &stack, BytesPerSecond: 1 << 40, OpsPerSecond: 100}},
		Nets:  []Net{{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500}}, MaxFile: 1 << 40,
	}
}

func messages() []Message {
	return []Message{
		&Boot{
			Cmdline: "quiet", Memory: 256 << 20, VCPUs: 2, Profile: "host-v1", HasInitrd: true, Devices: devices(),
		},
		&Spare{Memory: stack(), Profile: "host-v1", VCPUs: 1, HasUserfaultfd: true, Watch: true, Touch: Touched{
			Written: []extent.Run{{Start: 4096, Length: 8192}}, Read: []extent.Run{{Start: 1 << 30, Length: 4096}, {Start: 2 << 30, Length: 4096}},
		}},
		&Load{ID: 8, Devices: devices()},
		&Save{ID: 9},
		&Save{ID: 9, Stream: true, Memory: []extent.Run{{Start: 4096, Length: 8192}}},
		&Connect{ID: 7, Port: 1<<32 - 1},
		&Plug{ID: 8, Net: 1},
		&Simple{Kind: KindPause, ID: 1},
		&Simple{Kind: KindGenerationID, ID: 2},
		&Balloon{ID: 3, Bytes: 1 << 40},
		&Reply{ID: 4, Error: "no", Data: []byte("tail")},
		&Ready{},
		&Exit{Reason: "panic", Detail: "vCPU 0", Console: []byte("Oops")},
	}
}

func TestRoundTrip(t *testing.T) {
	for _, m := range messages() {
		got, err := Unmarshal(Marshal(m))
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%+v came back as %+v, %v", m, got, err)
		}
	}
}

func TestUnmarshalRefuses(t *testing.T) {
	long := Marshal(&Boot{Cmdline: strings.Repeat("x", maxText+1)})
	for name, b := range map[string][]byte{
		"nothing":        nil,
		"unknown kind":   {200, 1},
		"no version":     {byte(KindReady)},
		"trailing bytes": append(Marshal(&Ready{}), 0),
		"short":          Marshal(&Connect{ID: 300, Port: 2})[:3],
		"long text":      long,
		"short MAC":      bytes.Replace(Marshal(messages()[0]), []byte{6, 2, 0, 0, 0, 0, 1}, []byte{5, 2, 0, 0, 0, 0}, 1),
	} {
		if m, err := Unmarshal(b); err == nil {
			t.Errorf("%s: decoded as %+v", name, m)
		}
	}
}

// TestHello: a vmm without a Hello speaks version 1, a newer one the version that it
// sends.
func TestHello(t *testing.T) {
	for _, want := range []uint64{1, Protocol, Protocol + 1} {
		if h, err := UnmarshalHello(Hello{want}.Marshal()); err != nil || h.Protocol != want {
			t.Errorf("%d came back as %+v, %v", want, h, err)
		}
	}
	if h, err := UnmarshalHello(nil); err != nil || h.Protocol != 1 {
		t.Errorf("nothing: %+v, %v", h, err)
	}
	for what, b := range map[string][]byte{
		"version 0": Hello{}.Marshal(), "a version that never is": Hello{1 << 40}.Marshal(),
		"half": Hello{300}.Marshal()[:2], "more": append(Hello{1}.Marshal(), 0),
	} {
		if h, err := UnmarshalHello(b); err == nil {
			t.Errorf("%s: %+v", what, h)
		}
	}
}

func FuzzHello(f *testing.F) {
	f.Add([]byte{})
	f.Add(Hello{Protocol}.Marshal())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := UnmarshalHello(b)
		if err != nil {
			return
		}
		if again, err := UnmarshalHello(h.Marshal()); err != nil || again != h || h.Protocol == 0 {
			t.Fatalf("%+v came back as %+v, %v", h, again, err)
		}
	})
}

func FuzzUnmarshal(f *testing.F) {
	for _, m := range messages() {
		f.Add(Marshal(m))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Unmarshal(b)
		if err != nil {
			return
		}
		again, err := Unmarshal(Marshal(m))
		if err != nil || !reflect.DeepEqual(m, again) {
			t.Fatalf("%+v came back as %+v, %v", m, again, err)
		}
	})
}

func pair(t *testing.T) (a, b *Conn) {
	t.Helper()
	x, y, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []struct {
		f *os.File
		c **Conn
	}{{x, &a}, {y, &b}} {
		if *e.c, err = NewConn(e.f); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = (*e.c).Close() })
	}
	return a, b
}

func TestConnPassesFiles(t *testing.T) {
	a, b := pair(t)
	f, err := os.CreateTemp(t.TempDir(), "passed")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := a.Send(&Connect{ID: 1, Port: 2}, f); err != nil {
		t.Fatal(err)
	}
	m, files, err := b.Receive()
	if err != nil || len(files) != 1 {
		t.Fatalf("received %+v with %d files, %v", m, len(files), err)
	}
	defer func() { _ = files[0].Close() }()
	if _, err := files[0].WriteString("through"); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil || string(got) != "through" {
		t.Fatalf("the file has %q, %v", got, err)
	}
}

func TestConnEnds(t *testing.T) {
	a, b := pair(t)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("receive after the peer closed: %v, want EOF", err)
	}
	if err := b.Send(&Ready{}); err == nil {
		t.Error("sent to nobody")
	}
}

func TestConnRefusesTooMuch(t *testing.T) {
	a, _ := pair(t)
	if err := a.Send(&Reply{Data: make([]byte, MaxMessage)}); err == nil {
		t.Error("an oversized message was sent")
	}
	if err := a.Send(&Ready{}, make([]*os.File, MaxFiles+1)...); err == nil {
		t.Error("too many files were sent")
	}
}
