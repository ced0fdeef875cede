package guestmem

import (
	"fmt"
	"os"
	"testing"
	"time"

	"agentrun.dev/internal/storage/extent"
	"golang.org/x/sys/unix"
)

// BenchmarkCapture measures the parts of a capture separately: Arm (beside the
// guest), Begin (in the pause) and List (after it), for 1 GiB of RAM of which one
// page in a hundred is the process's own. It reports the shortest times, because
// other processes can only add to them. late leaves all the work of Arm to Begin.
//
//	go test ./internal/vmm/guestmem -run '^$' -bench Capture -benchtime 20x
func BenchmarkCapture(b *testing.B) {
	const size = 1 << 30
	for _, layered := range []bool{true, false} {
		for _, late := range []bool{false, true} {
			for _, written := range []uint64{0, 32} {
				if late && written > 0 {
					continue
				}
				name := fmt.Sprintf("layered=%t/late=%t/written=%d", layered, late, written)
				b.Run(name, func(b *testing.B) { benchmarkCapture(b, size, layered, late, written) })
			}
		}
	}
}

// benchmarkCapture captures repeatedly. Between Arm and Begin it writes to a page of
// each of the first written pieces of 2 MiB.
func benchmarkCapture(b *testing.B, size uint64, layered, late bool, written uint64) {
	open := func(path string, flags int) *os.File {
		f, err := os.OpenFile(path, flags, 0)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = f.Close() })
		return f
	}
	memfd := func() *os.File {
		fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC)
		if err != nil {
			b.Fatal(err)
		}
		return os.NewFile(uintptr(fd), "layer")
	}
	var mappings []Mapping
	if layered {
		file := memfd()
		defer func() { _ = file.Close() }()
		if err := file.Truncate(int64(size)); err != nil {
			b.Fatal(err)
		}
		mappings = []Mapping{{extent.Run{Start: 0, Length: size}, file, 0}}
	}
	m, err := NewLayered(size, mappings)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	_ = unix.Madvise(m.regions[0].bytes, unix.MADV_NOHUGEPAGE)
	write := func(gpa uint64) {
		if err := m.Write(gpa, []byte{1}); err != nil {
			b.Fatal(err)
		}
	}
	for at := uint64(0); at < size; at += 100 * PageSize {
		write(at)
	}
	pagemap, uffd := open("/proc/self/pagemap", os.O_RDONLY), open("/dev/userfaultfd", os.O_RDWR)
	least := make(map[string]time.Duration)
	measure := func(name string, do func() error) {
		began := time.Now()
		if err := do(); err != nil {
			b.Fatal(err)
		}
		took := time.Since(began)
		if before, ok := least[name]; !ok || took < before {
			least[name] = took
		}
	}
	for b.Loop() {
		file := memfd()
		c := m.NewCapture(CaptureConfig{Userfaultfd: uffd, Pagemap: pagemap, File: file})
		if c.Early() && !late {
			if err := c.Announce(); err != nil {
				b.Fatal(err)
			}
			measure("arm", c.Arm)
		}
		for i := range written {
			write(i * hugeSize)
		}
		measure("begin", c.Begin)
		measure("list", func() error {
			_, _, err := c.List(nil)
			return err
		})
		if err := c.Close(); err != nil {
			b.Fatal(err)
		}
		_ = file.Close()
	}
	for name, d := range least {
		b.ReportMetric(float64(d.Microseconds())/1000, "ms/"+name)
	}
}
