package jail

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// envHolder makes the test's binary a holder of memory.
const envHolder = "AGENTRUN_TEST_JAIL_HOLDER"

func init() {
	if os.Getenv(envHolder) == "" {
		return
	}
	hold()
	os.Exit(0)
}

// hold allocates memory, writes files and frees its memory, as its standard input
// says.
func hold() {
	var memory []byte
	block := make([]byte, mib)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var verb, path string
		var size int
		_, err := fmt.Sscan(lines.Text(), &verb, &size, &path)
		switch verb {
		case "hold":
			if memory, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE); err != nil {
				break
			}
			for i := 0; i < size; i += os.Getpagesize() {
				memory[i] = 1
			}
		case "free":
			err = unix.Munmap(memory)
		case "write":
			var f *os.File
			if f, err = os.Create(path); err != nil {
				break
			}
			for range size / mib {
				if _, err = f.Write(block); err != nil {
					break
				}
			}
			_ = f.Close()
		}
		fmt.Println(verb, err)
	}
}

// holder is a process in a group that runs hold.
type holder struct {
	*Group
	cmd *exec.Cmd
	in  io.Writer
	out *bufio.Scanner
}

func startHolder(t *testing.T, memory uint64) *holder {
	t.Helper()
	groups, err := OpenGroups()
	if err != nil {
		t.Fatal(err)
	}
	name := strings.ToLower(filepath.Base(t.Name()))
	if err := groups.Remove(name); err != nil {
		t.Fatal(err)
	}
	g, err := groups.Create(name, Limits{Memory: memory, MilliCPUs: 2000, Threads: 64})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{envHolder + "=1"}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = cmd.Process.Kill(), cmd.Wait()
		if kills, err := g.Release(); err != nil || kills != 0 {
			t.Errorf("the kernel killed %d in the group, %v", kills, err)
		}
	})
	return &holder{g, cmd, in, bufio.NewScanner(out)}
}

// do sends the holder a command and waits until it is done.
func (h *holder) do(t *testing.T, format string, args ...any) {
	t.Helper()
	order := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintln(h.in, order+" -"); err != nil {
		t.Fatalf("%s: %v", order, err)
	}
	if !h.out.Scan() || !strings.HasSuffix(h.out.Text(), " <nil>") {
		t.Fatalf("%s: it said %q", order, h.out.Text())
	}
}

// limited checks the limit.
func (h *holder) limited(t *testing.T, want uint64) {
	t.Helper()
	if usage, limit, err := h.Memory(); err != nil || limit != want {
		t.Errorf("the limit is %d MiB, not %d, with %d in use: %v", limit/mib, want/mib, usage/mib, err)
	}
}

// inMemory is the path of a file on tmpfs.
func inMemory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "agentrun-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "file")
}

// TestExtendedWhileInUse: back does not lower the limit while the memory is in
// use. On cgroups v2 that would kill the owner, and on v1 it would be an error.
// The owner has its old limit again once the memory is free.
func TestExtendedWhileInUse(t *testing.T) {
	h := startHolder(t, 96*mib)
	path := inMemory(t)
	back, err := h.Extend(96 * mib)
	if err != nil {
		t.Fatal(err)
	}
	h.do(t, "hold %d", 60*mib)
	h.do(t, "write %d %s", 60*mib, path)
	if err := back(); err != nil {
		t.Error(err)
	}
	if usage, limit, err := h.Memory(); err != nil || limit < usage || limit > 192*mib {
		t.Errorf("the limit is %d MiB, %d are in use: %v", limit/mib, usage/mib, err)
	}
	h.do(t, "nothing 0") // it lives
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	// Any change lowers a limit that is too high.
	if back, err = h.Extend(0); err == nil {
		err = back()
	}
	if err != nil {
		t.Fatal(err)
	}
	h.limited(t, 96*mib)
	h.do(t, "nothing 0")
}
