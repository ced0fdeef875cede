package debian

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// envHold makes the test binary run a program apart that holds a lock on a file,
// for ever.
const envHold = "AGENTRUN_TEST_HOLD"

const hold = `exec 9>"$1"; flock 9; echo held; exec sleep 100000`

func TestMain(m *testing.M) {
	if file := os.Getenv(envHold); file != "" {
		_, err := runApart(context.Background(), os.Stdout, os.Environ(), "sh", "-c", hold, "hold", file)
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestKilled: the programs of a build die with their builder, even if it is
// killed.
func TestKilled(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), envHold+"="+file)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(stdout, make([]byte, len("held\n"))); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	wantFree(t, file)
}

// TestStopped: so do they when the work is given up.
func TestStopped(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	ctx, cancel := context.WithCancel(t.Context())
	_, err := runApart(ctx, writerFunc(cancel), os.Environ(), "sh", "-c", hold, "hold", file)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	wantFree(t, file)
}

// writerFunc is called when something is written.
type writerFunc func()

func (f writerFunc) Write(p []byte) (int, error) {
	f()
	return len(p), nil
}

// wantFree waits until a file has no lock.
func wantFree(t *testing.T, file string) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	free := make(chan error, 1)
	go func() { free <- unix.Flock(int(f.Fd()), unix.LOCK_EX) }()
	select {
	case err := <-free:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the program that was started lives on")
	}
}
