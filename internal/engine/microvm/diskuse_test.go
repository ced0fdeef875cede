package microvm

import (
	"os"
	"testing"

	"agentrun.dev/internal/engine/microvm/process"
)

// TestDiskUse: diskUse counts the allocated bytes of files without a name that are
// open for writing.
func TestDiskUse(t *testing.T) {
	before, err := diskUse(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	scratch, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = scratch.Close() }()
	top, err := (&Engine{scratch: scratch}).top()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = top.Close() }()
	if err := top.Truncate(1 << 40); err != nil {
		t.Fatal(err)
	}
	if _, err := top.WriteAt(make([]byte, mib), 1<<39); err != nil {
		t.Fatal(err)
	}
	if err := top.Sync(); err != nil { // file systems allocate late
		t.Fatal(err)
	}
	layer, err := reopen(top) // descriptors that others only read from
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = layer.Close() }()
	memory, err := process.MemoryFile("memory", make([]byte, 3*mib))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = memory.Close() }()
	if n, err := diskUse(os.Getpid()); err != nil || n < before+mib || n > before+2*mib {
		t.Errorf("%d bytes, before %d (%v)", n, before, err)
	}
	if _, err := diskUse(1 << 30); err == nil {
		t.Error("a process that is not there has disks")
	}
}
