package microvm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/engine/pool"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// jailedEngine is an engine whose vmm processes are in a test's jail.
func jailedEngine(t *testing.T, j *jail.Jail, resident string) *Engine {
	t.Helper()
	r, err := layer.OpenResident(resident)
	if err != nil {
		t.Fatal(err)
	}
	scratch, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return &Engine{resident: r, scratch: scratch, vmm: j}
}

func residentFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "agentrun-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// spareSnapshot is a snapshot from which spares can be made on any KVM. Its state is
// invalid, so that no fork can be loaded.
func spareSnapshot(t *testing.T, dir string) *snapshot.Snapshot {
	t.Helper()
	return doctoredSnapshot(t, dir, func(*snapshot.CPU) {})
}

// doctoredSnapshot is a spareSnapshot that claims to be from another processor.
func doctoredSnapshot(t *testing.T, dir string, doctor func(*snapshot.CPU)) *snapshot.Snapshot {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "layer"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }() // it is copied
	w := layer.NewWriter(f)
	if _, err := w.Write(bytes.Repeat([]byte("memory! "), 2*mib/8)); err != nil {
		t.Fatal(err)
	}
	b, err := snapshot.NewBuilder(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.AddLayer(w.Ref(), f); err != nil {
		t.Fatal(err)
	}
	cpu, err := (&hostCPU{}).get()
	if err != nil {
		t.Fatal(err)
	}
	doctor(&cpu)
	snap, err := b.Commit(snapshot.Manifest{
		Created: time.Now().UTC().Truncate(time.Second), Kernel: strings.Repeat("ab", 32), CPU: cpu, TSCKHz: 1, VCPUs: 2,
		Memory: snapshot.StackOf(layer.Stack{
			Size: 64 * mib, Layers: []layer.Ref{w.Ref()},
			Extents: []layer.Extent{{Start: mib, Length: mib}, {Start: 9 * mib, Length: mib, Offset: mib}},
		}),
		Disks: []snapshot.Disk{{ID: "scratch", Stack: snapshot.Stack{Size: mib}}},
	}, []byte("no state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	return snap
}

// pids lists the processes in the jail.
func (j testJail) pids(t *testing.T) (pids []int) {
	t.Helper()
	for _, dir := range j.groups(t, "vm-*") {
		b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			t.Fatal(err)
		}
		for _, field := range strings.Fields(string(b)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			// There may be a hierarchy per controller. A process that has ended, and
			// whose parent is just being told, is listed as 0 (cgroups v2).
			if pid != 0 && !slices.Contains(pids, pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

const noState = "no state of a microVM"

// TestSpares: as many spares wait as were asked for. A fork takes a spare and another
// spare takes its place. A spare that dies is replaced. Nothing is left behind.
func TestSpares(t *testing.T) {
	j := openJail(t)
	startBare(t, j).Kill() // makes everything that is made only once
	snap := spareSnapshot(t, filepath.Join(t.TempDir(), "snapshot"))
	e := jailedEngine(t, j.Jail, residentFolder(t))
	before := look(t)
	kept, err := e.KeepSpares(snap, 3)
	if err != nil {
		t.Fatal(err)
	}
	waitFull(t, kept)
	if pids := j.pids(t); len(pids) != 3 {
		t.Errorf("processes %v", pids)
	}
	// The spare refuses the state, as a new process would.
	refused := func() {
		t.Helper()
		if _, err := e.Fork(t.Context(), snap, engine.ForkOptions{}); err == nil || !strings.Contains(err.Error(), noState) {
			t.Errorf("forked: %v", err)
		}
		waitFull(t, kept)
	}
	refused()
	about := subject{snapshot: snap.ID()}
	for i := range ForksAsked {
		if _, learn := e.touched.of(about); !learn {
			t.Errorf("%d forks were asked, one of them one that failed", i+1)
		}
	}
	// A fork that will be asked for its touched pages is watched, and takes no spare.
	cold := kept.Stats().Taken == 0
	if cold != e.cpu.mapsAhead() {
		t.Errorf("%+v, KVM maps ahead: %t", kept.Stats(), e.cpu.mapsAhead())
	}
	if cold {
		refused()
	}
	if st := kept.Stats(); st.Waiting != 3 || st.Taken != 1 || st.Lost != 0 {
		t.Errorf("%+v", st)
	}
	if err := unix.Kill(j.pids(t)[0], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := kept.(*spares).pool.WaitUntil(t.Context(), func(st pool.Stats) bool { return st.Lost == 1 }); err != nil {
		t.Fatal(err)
	}
	waitFull(t, kept)
	e.spares.renew(snap.ID())
	waitFull(t, kept)
	if err := errors.Join(kept.Close(), kept.Close()); err != nil {
		t.Fatal(err)
	}
	j.nothingLeft(t, before)

	// Closing the engine closes its spares.
	if kept, err = e.KeepSpares(snap, 2); err != nil {
		t.Fatal(err)
	}
	waitFull(t, kept)
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	j.nothingLeft(t, before)
	if _, err := e.KeepSpares(snap, 1); err == nil {
		t.Error("a closed engine keeps spares")
	}
}

func waitFull(t *testing.T, s engine.Spares) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.WaitFull(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestFillSpare: a spare gets the limits of the fork that takes it. A spare that has
// died is passed over. Without spares a process is started.
func TestFillSpare(t *testing.T) {
	j := openJail(t)
	snap := spareSnapshot(t, filepath.Join(t.TempDir(), "snapshot"))
	e := jailedEngine(t, j.Jail, residentFolder(t))
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	asked := engine.ForkOptions{Limits: engine.Limits{MilliCPUs: 700}}
	for name, c := range map[string]struct{ dead, alive int }{
		"one waits": {0, 1}, "one has died": {2, 1}, "all have died": {1, 0}, "none": {0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var waiting []*process.Process
			for i := range c.dead + c.alive {
				sp, err := e.newSpare(t.Context(), snap)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(sp.Kill)
				if i < c.dead {
					sp.Kill()
				}
				waiting = append(waiting, sp.Process)
			}
			all := slices.Clone(waiting)
			from := e.originOf(snap)
			from.spare = func() (p *process.Process, ok bool) {
				if len(waiting) > 0 {
					p, waiting, ok = waiting[0], waiting[1:], true
				}
				return p, ok
			}
			s, err := e.describe(snap, "")
			if err != nil {
				t.Fatal(err)
			}
			if _, err := e.restore(t.Context(), s, asked, from); err == nil || !strings.Contains(err.Error(), noState) {
				t.Errorf("restored: %v", err)
			}
			if len(waiting) > 0 {
				t.Errorf("%d were not tried", len(waiting))
			}
			for _, p := range all {
				if p.Limits().MilliCPUs != 700 && p.Limits().MilliCPUs != 3000 {
					t.Errorf("limits %+v", p.Limits())
				}
			}
			if c.alive > 0 && all[c.dead].Limits().MilliCPUs != 700 {
				t.Errorf("the fork's limits were not set: %+v", all[c.dead].Limits())
			}
			if pids := j.pids(t); len(pids) > 0 {
				t.Errorf("processes %v are left", pids)
			}
		})
	}
}

// spareParent turns the test program into a process that keeps spares of a snapshot
// in a jail. Its value holds the jail's folder and cgroup, the snapshot and a folder
// for layers.
const spareParent = "AGENTRUN_TEST_SPARE_PARENT"

// TestSpareParent is the process that TestSparesEndWithParent kills.
func TestSpareParent(t *testing.T) {
	args := strings.Fields(os.Getenv(spareParent))
	if len(args) != 4 {
		return // run without the variable: there is nothing to test
	}
	program, err := assets.Path(assets.VMM)
	if err != nil {
		t.Fatal(err)
	}
	snap, err := snapshot.Open(args[2])
	if err != nil {
		t.Fatal(err)
	}
	e := jailedEngine(t, jail.New(jail.Config{Program: program, Folder: args[0], Cgroup: args[1]}), args[3])
	kept, err := e.KeepSpares(snap, 2)
	if err != nil {
		t.Fatal(err)
	}
	waitFull(t, kept)
	fmt.Println("kept")
	<-t.Context().Done() // it is killed before
}

// TestSparesEndWithParent: waiting spares do not outlive a parent that was killed.
// The next parent finds only remains that can be swept.
func TestSparesEndWithParent(t *testing.T) {
	j := openJail(t)
	dir := filepath.Join(t.TempDir(), "snapshot")
	spareSnapshot(t, dir)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestSpareParent$")
	cmd.Env = append(os.Environ(), spareParent+"="+strings.Join([]string{j.folder, j.cgroup, dir, residentFolder(t)}, " "),
		"TMPDIR="+t.TempDir()) // what it leaves behind
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "kept\n" {
		t.Errorf("it said %q, %v", line, err)
	}
	ended := enginetest.Hold(t, j.pids(t))
	if len(ended) != 2 {
		t.Errorf("%d spares", len(ended))
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	for _, a := range ended {
		if err := errors.Join(a.Wait(), a.Close()); err != nil { // frees the handle, or the test would reach its limit
			t.Error(err)
		}
	}
	if err := j.Sweep(); err != nil {
		t.Error(err)
	}
	if left := j.groups(t, "vm-*"); len(left) > 0 {
		t.Errorf("cgroups: %q", left)
	}
}
