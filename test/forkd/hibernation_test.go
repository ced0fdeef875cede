package forkd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

const mib = 1 << 20

// inMemory is the size of the daemon's folder in /dev/shm.
func (n *node) inMemory() (bytes uint64) {
	dir := layer.ResidentFolder(filepath.Join(n.State, "forkd"))
	// The daemon may remove files meanwhile.
	_ = filepath.WalkDir(dir, func(path string, _ os.DirEntry, _ error) error {
		var st unix.Stat_t
		if unix.Lstat(path, &st) == nil {
			bytes += uint64(st.Blocks) * 512
		}
		return nil
	})
	return bytes
}

// running returns the running sandboxes, with their resource versions: a sandbox that has
// the same version before and after a look has not changed in between.
func (n *node) running(ctx context.Context) (map[string]string, error) {
	list, err := n.Client.Sandboxes(ctx, false)
	out := map[string]string{}
	for _, s := range list {
		if s.State == rest.SandboxStateRunning {
			out[s.Name] = s.ResourceVersion
		}
	}
	return out, err
}

// reservedForLayers returns an upper bound of the bytes that are reserved for files in
// /dev/shm while look runs: all reserved bytes, without the memory of machines. Machines that
// run throughout have own bytes each. Others are not known, so the memory of a machine that
// is just being woken, hibernated or made counts as that of layers.
//
// The daemon reserves before use and releases after it: memory that is reserved both before
// and after look is reserved during look.
func (n *node) reservedForLayers(ctx context.Context, own int64, look func()) (bytes int64, err error) {
	ranBefore, err := n.running(ctx)
	if err != nil {
		return 0, err
	}
	before, err := n.Client.Node(ctx)
	if err != nil {
		return 0, err
	}
	look()
	after, err := n.Client.Node(ctx)
	if err != nil {
		return 0, err
	}
	ranAfter, err := n.running(ctx)
	bytes = max(before.Reserved, after.Reserved)
	for name, version := range ranBefore {
		if ranAfter[name] == version {
			bytes -= own
		}
	}
	return bytes, err
}

// watchMemory checks until stop that the files in memory are not larger than the
// memory reserved for them.
func (n *node) watchMemory(own int64) (stop func()) {
	ctx, cancel := context.WithCancel(n.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			var used uint64
			reserved, err := n.reservedForLayers(ctx, own, func() { used = n.inMemory() })
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				n.t.Error(err)
				return
			case int64(used) > reserved:
				n.t.Errorf("%d MiB are in memory, and %d are reserved for it", used/mib, reserved/mib)
			}
			// The sandboxes need the processor, too.
			select {
			case <-ctx.Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	return func() { cancel(); <-done }
}

// own is the memory reserved for a machine of a pool, without the layers of its template,
// which other machines have already.
func (f *filler) own() int64 {
	f.t.Helper()
	reserved := func() int64 {
		node, err := f.Client.Node(f.t.Context())
		if err != nil {
			f.t.Fatal(err)
		}
		return node.Reserved
	}
	before := reserved()
	if _, err := f.Client.CreateSandbox(f.t.Context(), rest.SandboxCreate{Name: "one", Pool: "large"}, ""); err != nil {
		f.t.Fatal(err)
	}
	own := reserved() - before
	if _, err := f.Client.Kill(f.t.Context(), "one"); err != nil {
		f.t.Fatal(err)
	}
	if own <= int64(f.bytes) || reserved() != before {
		f.t.Fatalf("%d MiB are reserved for a machine, and %d before and %d after it", own/mib, before/mib, reserved()/mib)
	}
	return own
}

// filler fills sandboxes with data.
type filler struct {
	*node
	bytes int
	sums  map[string]string
}

// sum prints a checksum of the data in a sandbox.
const sum = "print(zlib.crc32(data), end='')"

func (f *filler) code(name, code string) string {
	f.t.Helper()
	r, err := f.Client.RunCode(f.t.Context(), name, rest.CodeRequest{Code: code})
	if err != nil || r.ExitCode != 0 {
		f.t.Fatalf("%s in %s: %+v, %v", code, name, r, err)
	}
	return r.Stdout
}

func (f *filler) fill(name string) {
	f.t.Helper()
	if _, err := f.Client.CreateSandbox(f.t.Context(), rest.SandboxCreate{Name: name, Pool: "large"}, ""); err != nil {
		f.t.Fatal(err)
	}
	// No two pages are alike, in this sandbox or another. An emulated guest makes and
	// sums these pages many times as fast as random bytes and their SHA-256.
	f.sums[name] = f.code(name, fmt.Sprintf(`import hashlib, zlib
data = bytearray(%d)
for at in range(0, len(data), 4096):
    data[at:at + 4096] = hashlib.sha256(b"%s %%d" %% at).digest() * 128
%s`, f.bytes, name, sum))
}

func (f *filler) check(name string) {
	f.t.Helper()
	if got := f.code(name, sum); got != f.sums[name] {
		f.t.Errorf("%s woke with other memory: %s, not %s", name, got, f.sums[name])
	}
}

func (f *filler) do(name string, verb client.Verb) {
	f.t.Helper()
	if _, err := f.Client.Do(f.t.Context(), name, verb); err != nil {
		f.t.Fatalf("%s %s: %v", verb, name, err)
	}
}

// TestHibernationFreesMemory: sandboxes are filled and hibernated in turn, and
// /dev/shm has its previous size after each. All wake with their memory, as many
// at a time as there is room for. The files in memory are covered by reservations
// at all times.
func TestHibernationFreesMemory(t *testing.T) {
	n := newNode(t)
	sandboxes, size := soak.Count(20, 3), soak.Count(200, 64)
	// Room for a few that are awake.
	capacity := 1500
	if soak.On() {
		capacity = max(capacity, 6*(2*size+300))
	}
	flags := []string{"--capacity", fmt.Sprintf("%dM", capacity)}
	n.up(flags...)
	image := pythonImage(t)
	n.template(image)
	ctx := t.Context()
	if _, err := n.Client.PutTemplate(ctx, "large", rest.TemplateSpec{
		Image: "python:3.12-slim", MilliCPUs: 1000, Memory: int64(size+128) * mib, Warmup: &rest.Program{Language: "python", Text: "warm = 1"},
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Client.PutPool(ctx, "large", rest.PoolSpec{Template: "large", Replicas: 0}); err != nil {
		t.Fatal(err)
	}
	n.waitReady(ctx, "large")
	f := &filler{node: n, bytes: size * mib, sums: map[string]string{}}
	f.fill("first") // the first one loads the layers
	// No machine waits in the pool: all reservations are for running machines
	// and for layers.
	if err := n.Client.DeletePool(ctx, "pool"); err != nil {
		t.Fatal(err)
	}
	own := f.own()
	before := n.inMemory()
	stop := n.watchMemory(own)
	var names []string
	for i := range sandboxes {
		name := fmt.Sprintf("s-%d", i)
		names = append(names, name)
		f.fill(name)
		f.do(name, client.Hibernate)
		if after := n.inMemory(); after > before+16*mib {
			t.Errorf("%d MiB were in memory, and %d are after %s was hibernated", before/mib, after/mib, name)
		}
	}
	if node, err := n.Client.Node(ctx); err != nil || node.Hibernated != sandboxes {
		t.Errorf("%+v, %v", node, err)
	}
	q, err := n.Client.Quota(ctx)
	if err != nil || q.Used.Storage < int64(sandboxes*size*mib) {
		t.Errorf("%d MiB are stored, of %d sandboxes of %d: %v", q.Used.Storage/mib, sandboxes, size, err)
	}
	most := f.wakeAll(names)
	t.Logf("%d sandboxes of %d MiB, at most %d awake at once", sandboxes, size, most)
	if most < 2 {
		t.Errorf("only %d were awake at once", most)
	}
	stop()
	// The next daemon counts the same, and has the sandboxes that woke.
	n.Kill()
	n.up(flags...)
	f.check(names[len(names)-1])
	var used uint64
	if reserved, err := n.reservedForLayers(ctx, own, func() { used = n.inMemory() }); err != nil || int64(used) > reserved {
		t.Errorf("after a crash %d MiB are in memory, and %d are reserved for it: %v", used/mib, reserved/mib, err)
	}
	for _, name := range append(names, "first") {
		if _, err := n.Client.Kill(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	if after := n.inMemory(); after > before+16*mib {
		t.Errorf("%d MiB are left in memory", after/mib)
	}
	if _, err := n.Client.PutPool(ctx, "pool", rest.PoolSpec{Template: "python", Replicas: 2}); err != nil {
		t.Fatal(err)
	}
	n.waitReady(ctx, "pool")
	n.end(new(traces))
}

// wakeAll wakes sandboxes in turn. If there is no room, the one that woke first is
// hibernated. It returns how many were awake at a time.
func (f *filler) wakeAll(names []string) (most int) {
	f.t.Helper()
	var awake []string
	for _, name := range names {
		for {
			_, err := f.Client.Do(f.t.Context(), name, client.Resume)
			if err == nil {
				break
			}
			if !strings.Contains(err.Error(), "no room") || len(awake) == 0 {
				f.t.Fatal(err)
			}
			f.do(awake[0], client.Hibernate)
			awake = awake[1:]
		}
		f.check(name)
		awake = append(awake, name)
		most = max(most, len(awake))
	}
	return most
}

// waitReady waits until a pool can be claimed of.
func (n *node) waitReady(ctx context.Context, pool string) {
	n.t.Helper()
	for {
		p, err := n.Client.Pool(ctx, pool)
		if err != nil || p.Phase == rest.PhaseFailed {
			n.t.Fatalf("%+v, %v", p, err)
		}
		if p.Phase == rest.PhaseReady {
			return
		}
		time.Sleep(50 * time.Millisecond) // the API has nothing to wait on
	}
}
