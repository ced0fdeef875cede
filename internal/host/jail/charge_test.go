package jail

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup2"
)

// wait returns when no limit remains to be lowered later.
func (b *budget) wait() {
	b.mu.Lock()
	settled := b.settled
	b.mu.Unlock()
	if settled != nil {
		<-settled
	}
}

// TestChargedFiles: the limit of a group is raised by the size of the files that
// it has filled until the last process closes them, and then falls back. The group
// may fill its own memory meanwhile.
func TestChargedFiles(t *testing.T) {
	h := startHolder(t, 96*mib)
	path := inMemory(t)
	back, err := h.Extend(200 * mib)
	if err != nil {
		t.Fatal(err)
	}
	h.do(t, "hold %d", 60*mib)
	h.do(t, "write %d %s", 60*mib, path)
	var files []*os.File
	for range 2 { // like a capture and its fork
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	if err := h.Charge(files[0]); err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	if err := h.groups.files.whenGone(files[0], func() { close(gone) }); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(back(), os.Remove(path)); err != nil {
		t.Fatal(err)
	}
	h.limited(t, 156*mib)
	if err := files[0].Close(); err != nil {
		t.Fatal(err)
	}
	h.do(t, "free 0")
	h.do(t, "hold %d", 70*mib)
	h.limited(t, 156*mib)
	select {
	case <-gone:
		t.Error("a file is gone that somebody has open")
	default:
	}
	if err := files[1].Close(); err != nil {
		t.Fatal(err)
	}
	<-gone
	h.budget.wait()
	h.limited(t, 96*mib)
	h.do(t, "nothing 0") // it lives
	w := &h.groups.files
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.events != nil {
		t.Error("an inotify instance is left that watches nothing")
	}
}

// TestKeptMemory: memory that the owner allocated below a raised limit is not taken
// away. The limit falls when the owner frees it, without any other operation.
func TestKeptMemory(t *testing.T) {
	h := startHolder(t, 64*mib)
	back, err := h.Extend(64 * mib)
	if err != nil {
		t.Fatal(err)
	}
	h.do(t, "hold %d", 90*mib)
	if err := back(); err != nil {
		t.Fatal(err)
	}
	if usage, limit, err := h.Memory(); err != nil || limit < usage || usage < 90*mib {
		t.Errorf("the limit is %d MiB, %d are in use: %v", limit/mib, usage/mib, err)
	}
	h.do(t, "free 0")
	h.budget.wait()
	h.limited(t, 64*mib)
}

// TestCachedPages: cached pages of files do not keep a limit high and cause no
// kill, even if they must be written back first.
func TestCachedPages(t *testing.T) {
	dir := t.TempDir()
	if cgroups.Mode() == cgroups.Unified { // in the testbed, where the other folders are in memory
		folder, _ := onPartition(t)
		dir = folder.Name()
	}
	const limit, room = 64 * mib, 6 * mib
	h := startHolder(t, limit)
	back, err := h.Extend(limit)
	if err != nil {
		t.Fatal(err)
	}
	h.do(t, "write %d %s", 12*mib, filepath.Join(dir, "file"))
	usage, _, err := h.Memory() // without cached pages
	if err != nil {
		t.Fatal(err)
	}
	h.do(t, "hold %d", limit-room-usage) // with the cached pages this is more than the limit
	if err := back(); err != nil {
		t.Fatal(err)
	}
	h.budget.wait()
	h.limited(t, limit)
	h.do(t, "nothing 0") // it lives
}

// TestReclaimByBound: memory is also reclaimed on kernels without memory.reclaim,
// and no process is slowed down afterwards.
func TestReclaimByBound(t *testing.T) {
	h := startHolder(t, 64*mib)
	g, ok := h.group.(v2Group)
	if !ok {
		return // cgroups v1 reclaim by themselves
	}
	folder, _ := onPartition(t)
	h.do(t, "write %d %s", 12*mib, filepath.Join(folder.Name(), "file"))
	charged := func() uint64 {
		t.Helper()
		st, err := g.StatFiltered(cgroup2.StatMemory)
		if err != nil {
			t.Fatal(err)
		}
		return st.GetMemory().GetUsage()
	}
	before := charged()
	if err := g.reclaimByBound(before - 8*mib); err != nil {
		t.Fatal(err)
	}
	if after := charged(); after > before-6*mib {
		t.Errorf("%d KiB were charged, %d are after 8 MiB were to be taken back", before>>10, after>>10)
	}
	if high, err := os.ReadFile(filepath.Join(g.dir, "memory.high")); err != nil || string(high) != "max\n" {
		t.Errorf("memory.high is %q, %v", high, err)
	}
}

// TestRestoredLimit: if a process raised a limit and was killed, the next process
// restores the limit.
func TestRestoredLimit(t *testing.T) {
	h := startHolder(t, 64*mib)
	if _, err := h.Extend(64 * mib); err != nil {
		t.Fatal(err)
	}
	h.Leave()
	found, err := h.groups.Open(h.name)
	if err != nil {
		t.Fatal(err)
	}
	if err := found.Restore(64 * mib); err != nil {
		t.Fatal(err)
	}
	h.limited(t, 64*mib)
	if _, err := h.Extend(mib); err != nil { // after Leave it changes no limit
		t.Fatal(err)
	}
	h.limited(t, 64*mib)
}

// TestNoWatches: on a host without inotify watches left, the charge is given back
// early, and no call fails.
func TestNoWatches(t *testing.T) {
	h := startHolder(t, 96*mib)
	full, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	h.groups.files = watcher{events: full, fd: -1, waiting: map[int32][]func(){0: nil}}
	f, err := os.Create(inMemory(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.Write(make([]byte, mib)); err != nil {
		t.Fatal(err)
	}
	if err := h.Charge(f); err != nil {
		t.Error(err)
	}
	h.limited(t, 96*mib)
	gave := false
	c := &Cell{cells: &cells{files: watcher{events: full, fd: -1, waiting: map[int32][]func(){0: nil}}}, group: h.group}
	if err := c.WhenGone(f, func() error { gave = true; return nil }); err != nil || !gave {
		t.Errorf("given back: %v, %v", gave, err)
	}
	if err := full.Close(); err != nil {
		t.Error(err)
	}
}
