package microvm

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestCharges: the limit of a vmm process is raised by the size of a file that it has
// filled, until no process has the file open or mapped. The limit falls back without
// another capture.
func TestCharges(t *testing.T) {
	p := startBare(t, openJail(t))
	limit := func() uint64 {
		t.Helper()
		_, limit, err := p.Charged()
		if err != nil {
			t.Fatal(err)
		}
		return limit
	}
	base := limit()
	c, err := p.NewCharged(64 * mib)
	if err != nil {
		t.Fatal(err)
	}
	if got := limit(); got != base+64*mib {
		t.Errorf("the limit is %d MiB higher, not 64", (got-base)/mib)
	}
	if err := c.Holds(3 * mib); err != nil {
		t.Fatal(err)
	}
	if err := c.Truncate(64 * mib); err != nil {
		t.Fatal(err)
	}
	mapped, err := unix.Mmap(int(c.Fd()), 0, 64*mib, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if got := limit(); got != base+3*mib {
		t.Errorf("the limit is %d MiB higher, not 3, while the file is mapped", (got-base)/mib)
	}
	if err := unix.Munmap(mapped); err != nil {
		t.Fatal(err)
	}
	for begin := time.Now(); limit() != base; time.Sleep(time.Millisecond) { // there is no event for it
		if time.Since(begin) > time.Minute {
			t.Fatalf("the limit stays %d MiB higher", (limit()-base)/mib)
		}
	}
}
