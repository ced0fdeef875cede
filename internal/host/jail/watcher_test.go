package jail

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestGoneFiles: a file is gone when no process has it open or mapped, whether it
// once had a name or not.
func TestGoneFiles(t *testing.T) {
	for name, create := range map[string]func(t *testing.T) *os.File{
		"on tmpfs": func(t *testing.T) *os.File {
			path := inMemory(t)
			f, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			return f
		},
		"memfd": func(t *testing.T) *os.File {
			fd, err := unix.MemfdCreate("gone", unix.MFD_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			return os.NewFile(uintptr(fd), "gone")
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := create(t)
			if err := f.Truncate(mib); err != nil {
				t.Fatal(err)
			}
			mapped, err := unix.Mmap(int(f.Fd()), 0, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			var w watcher
			gone := [2]chan struct{}{make(chan struct{}), make(chan struct{})}
			for _, ch := range gone {
				if err := w.whenGone(f, func() { close(ch) }); err != nil {
					t.Fatal(err)
				}
			}
			if filepath.IsAbs(f.Name()) {
				if err := os.Remove(f.Name()); err != nil {
					t.Fatal(err)
				}
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			select {
			case <-gone[0]:
				t.Error("it is gone while it is mapped")
			default:
			}
			if err := unix.Munmap(mapped); err != nil {
				t.Fatal(err)
			}
			<-gone[0]
			<-gone[1]
		})
	}
}
