package helper

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/vmm/vmmctl"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestConsoleKeepsTheTail(t *testing.T) {
	var c console
	for _, p := range [][]byte{bytes.Repeat([]byte("a"), consoleSize), []byte("the end")} {
		if n, err := c.Write(p); n != len(p) || err != nil {
			t.Fatal(n, err)
		}
	}
	got := c.bytes()
	if len(got) != consoleSize || !bytes.HasSuffix(got, []byte("athe end")) {
		t.Errorf("%d bytes, ending with %q", len(got), got[len(got)-10:])
	}
}

// TestBundle: runsc reads the requested settings, and the sandbox's kernel learns its
// size.
func TestBundle(t *testing.T) {
	c := &gvisorctl.Create{ID: "x", RunDir: t.TempDir(), Platform: "systrap", Hostname: "box", Memory: 100 << 20, Disk: 5 << 20, VCPUs: 3}
	bundle, err := writeBundle(c, newSpec(c, "/root.erofs"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		t.Fatal(err)
	}
	if a := spec.Annotations; a["dev.gvisor.spec.rootfs.source"] != "/root.erofs" || a["dev.gvisor.spec.rootfs.options"] != "size=5242880" || spec.Hostname != "box" {
		t.Errorf("%+v", spec)
	}
	args := []string{"runsc-sandbox", "--root=/x", "boot", "--bundle=" + bundle, "--total-memory", "123", "--attached", "x"}
	want := []string{"runsc-sandbox", "--root=/x", "boot", "--cpu-num=3", "--total-memory=104857600", "--bundle=" + bundle, "--attached", "x"}
	if got := BootArgs(args); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if !IsOurs(args) || !IsOurs(want) {
		t.Error("the kernel of a sandbox is not known as such")
	}
	if got := BootArgs(want); !slices.Equal(got, want) { // the kernel starts itself again
		t.Errorf("a second time: %q", got)
	}
	for _, other := range [][]string{{"x", "restore", "y"}, {"x", "boot", "--bundle=" + t.TempDir(), "y"}} {
		if got := BootArgs(other); !slices.Equal(got, other) {
			t.Errorf("%q became %q", other, got)
		}
		if IsOurs(other) {
			t.Errorf("%q is plain runsc's", other)
		}
	}
	if conf, err := newConfig(c); err != nil || conf.Platform != "systrap" || !conf.IgnoreCgroups {
		t.Errorf("%+v, %v", conf, err)
	}
}

// TestLazyGC: no collection happens before a usual restore is over. Then collections
// are rare, and once the heap has grown, they are as frequent as usual.
func TestLazyGC(t *testing.T) {
	old := debug.SetGCPercent(100)
	defer debug.SetGCPercent(old)
	asked := make(chan uint64, 10)
	sizes := []uint64{1, 2, smallHeap + 1}
	watchHeap(func() uint64 {
		n := sizes[0]
		sizes = sizes[1:]
		asked <- n
		return n
	})
	for _, want := range []uint64{1, 2, smallHeap + 1} {
		runtime.GC()
		if got := <-asked; got != want {
			t.Errorf("looked at %d, not %d", got, want)
		}
	}
	if liveHeap() == 0 {
		t.Error("the heap is empty")
	}
	LazyGC()
	goal := []metrics.Sample{{Name: "/gc/heap/goal:bytes"}}
	metrics.Read(goal)
	if got, want := goal[0].Value.Uint64(), uint64(32<<20); got < want {
		t.Errorf("garbage is collected before the heap has %d bytes; a restore takes 14 MiB, and seven tenths of %d are needed", got, want)
	}
}

// TestRequests: requests at the wrong time, or with the wrong files, are refused, and
// the helper goes on.
func TestRequests(t *testing.T) {
	ours, theirs, err := vmmctl.Pair()
	if err != nil {
		t.Fatal(err)
	}
	a, err := gvisorctl.NewConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	b, err := gvisorctl.NewConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{console: &console{}, creates: make(chan func()), ended: make(chan struct{})}
	s.parents.Add(b.Conn)
	go s.serve(b)
	for i, tt := range []struct{ op, say string }{
		{"dial", "no sandbox yet"}, {"start", "no sandbox yet"}, {"nonsense", "no sandbox yet"}, {"create", "wrong files"},
	} {
		if err := a.Send(&gvisorctl.Message{ID: uint64(i), Op: gvisorctl.Op(tt.op)}); err != nil {
			t.Fatal(err)
		}
		m, _, err := a.Receive()
		if err != nil || !m.Reply || m.ID != uint64(i) || !strings.Contains(m.Error, tt.say) {
			t.Errorf("%s: %+v, %v", tt.op, m, err)
		}
	}
	// If the parent goes and the sandbox has no listening socket, the helper ends
	// with it.
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	<-s.ended
	if s.exit.Reason != gvisorctl.ReasonStopped {
		t.Errorf("it ended with %+v", s.exit)
	}
}
