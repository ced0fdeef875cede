package networktest

import (
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// NoDescriptors lets the test's process open no further descriptors, until restore is
// called or the test ends.
func NoDescriptors(t testing.TB) (restore func()) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	free, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD_CLOEXEC, 0) // the lowest free descriptor
	if err == nil {
		err = unix.Close(free)
	}
	if err == nil {
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(free), Max: limit.Max})
	}
	if err != nil {
		t.Fatal(err)
	}
	restore = sync.OnceFunc(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(restore)
	return restore
}
