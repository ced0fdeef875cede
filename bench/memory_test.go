package bench

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

const smaps = `00400000-00500000 r-xp 00000000 00:2a 1 /opt/agent:run/vmm
Size:               1024 kB
Rss:                 800 kB
Pss:                 100 kB
Private_Clean:         8 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me sd
7f0000000000-7f0010000000 rw-p 00000000 00:01 2 /dev/shm/layer
Size:             262136 kB
Pss:                 900 kB
Private_Clean:       600 kB
Private_Dirty:       300 kB
Anonymous:           200 kB
VmFlags: rd wr mr mw me nr sd
7f0010000000-7f0010002000 rw-p 00000000 00:00 0
Size:                  8 kB
Pss:                   4 kB
Private_Clean:         0 kB
Private_Dirty:         4 kB
Anonymous:             4 kB
VmFlags: rd wr mr mw me nr sd nh
c000000000-c000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Pss:                 500 kB
Private_Clean:         0 kB
Private_Dirty:       500 kB
Anonymous:           500 kB
VmFlags: rd wr mr mw me ac sd nh
`

func TestParseSmaps(t *testing.T) {
	m, guest, err := parseSmaps(strings.NewReader(smaps))
	if err != nil {
		t.Fatal(err)
	}
	// Of the layer's 900 private KiB the fork has written 200.
	if want := (Memory{Guest: 204 << 10, Process: 508 << 10, ProcessShare: 600 << 10}); m != want || guest != 256<<20 {
		t.Errorf("got %+v of %d bytes, want %+v of 256 MiB", m, guest, want)
	}
	if _, _, err := parseSmaps(strings.NewReader("Size: many kB\n")); err == nil {
		t.Error("nonsense was read")
	}
}

// TestReadMemory: memory that is mapped like that of guests is distinguished from the
// rest. The test runs in a process of its own: the C library of the race detector
// maps 64 MiB for a new thread in the same way, unless told not to.
func TestReadMemory(t *testing.T) {
	const oneArena = "MALLOC_ARENA_MAX=1"
	if !slices.Contains(os.Environ(), oneArena) {
		again := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestReadMemory$")
		again.Env = append(os.Environ(), oneArena)
		if out, err := again.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	const size, touched = 64 << 20, 4096
	before, mapped, err := ownMemory()
	if err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	if err := unix.Madvise(b, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
		t.Fatal(err)
	}
	page := os.Getpagesize()
	for i := range touched {
		b[i*page] = 1
	}
	m, err := ReadMemory(os.Getpid(), mapped+size)
	if err != nil {
		t.Fatal(err)
	}
	// The race detector maps its own memory in the same way, a few MiB of it.
	if grown, want := m.Guest-before.Guest, uint64(touched*page); grown < want || grown > want+want/2 {
		t.Errorf("the guest's pages grew by %d bytes, want %d", grown, want)
	}
	if m.Process == 0 || m.ProcessShare == 0 || m.PageTables == 0 {
		t.Errorf("of the process itself: %+v", m)
	}
	if _, err := ReadMemory(os.Getpid(), mapped); err == nil {
		t.Error("more is mapped than the guest has, and it was not noticed")
	}
	if _, err := ReadMemory(-1, size); err == nil {
		t.Error("a process that cannot be was read")
	}
}

func TestAnonymous(t *testing.T) {
	if n, err := Anonymous(os.Getpid()); err != nil || n == 0 {
		t.Errorf("of this process: %d, %v", n, err)
	}
	if _, err := Anonymous(-1); err == nil {
		t.Error("a process that cannot be has memory")
	}
}

func TestKernelMemory(t *testing.T) {
	k := newKernelMemory()
	before, err := k.read()
	if err != nil || before == 0 {
		t.Fatalf("of the %s: %d, %v", k.From, before, err)
	}
	got, err := machineKernel("MemTotal: 1 kB\nSlab:   100 kB\nKernelStack: 20 kB\nPageTables:  3 kB\n")
	if err != nil || got != 123<<10 {
		t.Errorf("%d, %v", got, err)
	}
	if _, err := machineKernel("MemTotal: 1 kB\n"); err == nil {
		t.Error("nothing about the kernel, and no error")
	}
	if _, err := cgroupKernel("/nonexistent"); err == nil {
		t.Error("a file that is not there was read")
	}
}

func TestMedianMemory(t *testing.T) {
	got := medianMemory([]Memory{{Guest: 1, Kernel: -4}, {Guest: 30, Process: 3, Kernel: 10}, {Guest: 2, Process: 2, Kernel: 0}})
	if want := (Memory{Guest: 2, Process: 2, Kernel: 2}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	end := Memory{Guest: 30, Process: 5, PageTables: 8}
	if got, want := end.perFork(Memory{Guest: 10, Process: 9}, 20, 2), (Memory{Guest: 10, PageTables: 4, Kernel: 10}); got != want {
		t.Errorf("per fork %+v, want %+v", got, want)
	}
}

// TestWalls: as many as asked for live at once, no more are made at a time than
// allowed, and all end. A failure ends the existing ones.
func TestWalls(t *testing.T) {
	var making, alive, most, ended atomic.Int64
	// The first two wait for each other, which shows that two can be made at once.
	both := make(chan struct{})
	var second sync.Once
	fork := func(context.Context) (func() error, error) {
		if n := making.Add(1); n > 2 {
			t.Errorf("%d are made at once", n)
		} else if n == 2 {
			second.Do(func() { close(both) })
		}
		<-both
		making.Add(-1)
		most.Store(max(most.Load(), alive.Add(1)))
		return func() error { alive.Add(-1); ended.Add(1); return nil }, nil
	}
	got, err := walls(t.Context(), ForkConfig{Walls: []int{5, 2}, Parallel: 2}, fork)
	if err != nil || len(got) != 2 || got[0].Forks != 5 || got[1].Forks != 2 || got[0].Parallel != 2 || got[0].MS <= 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if alive.Load() != 0 || ended.Load() != 7 || most.Load() < 4 {
		t.Errorf("%d are left, %d ended, at most %d lived", alive.Load(), ended.Load(), most.Load())
	}
	broken := errors.New("broken")
	made := 0
	_, err = walls(t.Context(), ForkConfig{Walls: []int{5}, Parallel: 1}, func(context.Context) (func() error, error) {
		if made++; made == 3 {
			return nil, broken
		}
		alive.Add(1)
		return func() error { alive.Add(-1); return nil }, nil
	})
	if !errors.Is(err, broken) || made != 3 || alive.Load() != 0 {
		t.Errorf("%v after %d, %d are left", err, made, alive.Load())
	}
}

// TestForkBare makes a few real forks.
func TestForkBare(t *testing.T) {
	r, err := ForkBare(t.Context(), ForkConfig{Guest: Guest{Memory: 64 << 20, VCPUs: 1}, Count: 2, Walls: []int{3}, Parallel: 1})
	if err != nil {
		t.Fatal(err)
	}
	if r.FirstInstruction.N != 2 || r.FromSpare.N != 2 || r.AfterAnswer.Guest == 0 || r.KernelFrom == "" || len(r.Walls) != 1 || r.Alive != 2 {
		t.Errorf("%+v", r)
	}
}
