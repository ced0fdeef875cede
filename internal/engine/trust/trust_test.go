package trust

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"agentrun.dev/internal/vmm/vmmctl"
	"golang.org/x/sys/unix"
)

// TestPatience: the time that a process may take grows with the bytes that it has to
// copy, up to a maximum.
func TestPatience(t *testing.T) {
	for bytes, want := range map[uint64]time.Duration{
		0:                 answerTime,
		600 * slowestCopy: answerTime + 10*time.Minute,
		1 << 62:           answerTime + Longest,
	} {
		if got := Patience(bytes); got != want {
			t.Errorf("%d bytes may take %v, not %v", bytes, got, want)
		}
	}
}

// pair is the two ends of a control connection.
func pair(t *testing.T) (ours, theirs *vmmctl.Conn) {
	t.Helper()
	a, b, err := vmmctl.Pair()
	if err != nil {
		t.Fatal(err)
	}
	ours, err = vmmctl.NewConn(a)
	if err != nil {
		t.Fatal(err)
	}
	if theirs, err = vmmctl.NewConn(b); err != nil {
		t.Fatal(err)
	}
	return ours, theirs
}

// TestStop: Stop tells a process to stop and waits for it, whatever the process sends
// meanwhile. Files that it sends are closed. The wait ends with ctx if the process
// does not go.
func TestStop(t *testing.T) {
	stop := &vmmctl.Simple{Kind: vmmctl.KindStop, ID: 1}
	ours, theirs := pair(t)
	sent, other, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sent.Close() }()
	served := make(chan error, 1)
	go func() {
		m, _, err := theirs.Receive()
		if s, ok := m.(*vmmctl.Simple); err == nil && (!ok || s.Kind != vmmctl.KindStop) {
			err = errors.New("it was not told to stop")
		}
		served <- errors.Join(err, theirs.Send(&vmmctl.Ready{}, other), other.Close(), theirs.Close())
	}()
	if err := errors.Join(Stop[vmmctl.Message](t.Context(), ours, stop), <-served); err != nil {
		t.Error(err)
	}
	ends := []unix.PollFd{{Fd: int32(sent.Fd())}}
	if _, err := unix.Poll(ends, 0); err != nil || ends[0].Revents&unix.POLLHUP == 0 {
		t.Errorf("a file that it has sent is still open: %v, %v", ends, err)
	}
	ours, theirs = pair(t)
	defer func() { _ = theirs.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Stop[vmmctl.Message](ctx, ours, stop); !errors.Is(err, context.Canceled) && !errors.Is(err, fs.ErrClosed) {
		t.Error(err)
	}
	if _, err := vmmctl.Dial(filepath.Join(t.TempDir(), "none")); !Nobody(err) {
		t.Errorf("nobody is there: %v", err)
	}
}

// TestSeal: a file that a process can still write to is refused. A sealed file does
// not change any more.
func TestSeal(t *testing.T) {
	fd, err := unix.MemfdCreate("captured", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "captured")
	defer func() { _ = f.Close() }()
	if _, err := f.WriteString("what it was"); err != nil {
		t.Fatal(err)
	}
	mapped, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if err := Seal(f); !errors.Is(err, unix.EBUSY) {
		t.Errorf("with a mapping that can be written to: %v", err)
	}
	if err := errors.Join(unix.Munmap(mapped), Seal(f)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("else"), 0); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("written afterwards: %v", err)
	}
	if err := f.Truncate(0); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("shortened afterwards: %v", err)
	}
}
