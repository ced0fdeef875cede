package durable_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// actEnv makes the test's program perform one act and end.
const actEnv = "DURABLE_TEST_ACT"

func TestMain(m *testing.M) {
	name, dir, traced := strings.Cut(os.Getenv(actEnv), " ")
	if !traced {
		os.Exit(m.Run())
	}
	if err := act(name, dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// traced performs an act in a folder with a file called from and a folder called to.
// It returns the calls on them that ptrace(2) has seen.
func traced(t *testing.T, name string) (calls []string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "to"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "from"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread() // only the thread that traces a process may use ptrace on it
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), actEnv+"="+name+" "+dir)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if _, err := unix.Wait4(pid, nil, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
	if err := unix.PtraceSetOptions(pid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_EXITKILL); err != nil {
		t.Fatal(err)
	}
	inside := map[int]bool{} // the threads that are in a system call
	for tid, signal := pid, 0; ; {
		// A thread may have ended meanwhile.
		if err := unix.PtraceSyscall(tid, signal); err != nil && err != unix.ESRCH {
			t.Fatal(err)
		}
		var status unix.WaitStatus
		var err error
		if tid, err = unix.Wait4(-1, &status, unix.WALL, nil); err != nil {
			t.Fatal(err)
		}
		for !status.Stopped() {
			if tid == pid {
				if status.ExitStatus() != 0 {
					t.Fatalf("%s ended with %v", name, status)
				}
				return calls
			}
			if tid, err = unix.Wait4(-1, &status, unix.WALL, nil); err != nil {
				t.Fatal(err)
			}
		}
		signal = int(status.StopSignal())
		switch {
		case signal == int(unix.SIGTRAP)|0x80:
			signal = 0
			if inside[tid] = !inside[tid]; inside[tid] {
				if call := called(t, tid, dir); call != "" {
					calls = append(calls, call)
				}
			}
		case signal == int(unix.SIGTRAP), signal == int(unix.SIGSTOP): // a new thread, and its parent
			signal = 0
		}
	}
}

// called names the system call that a thread enters, if it concerns the folder.
func called(t *testing.T, tid int, dir string) string {
	t.Helper()
	var regs unix.PtraceRegs
	if err := unix.PtraceGetRegs(tid, &regs); err != nil {
		return "" // it was ended by another thread's exit
	}
	var verb string
	switch regs.Orig_rax {
	case unix.SYS_RENAME, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2:
		return "rename"
	case unix.SYS_LINK, unix.SYS_LINKAT:
		return "link"
	case unix.SYS_FSYNC:
		verb = "fsync"
	case unix.SYS_WRITE, unix.SYS_PWRITE64:
		verb = "write"
	default:
		return ""
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", tid, regs.Rdi))
	if err != nil {
		return ""
	}
	switch within, ok := strings.CutPrefix(path, dir); {
	case !ok:
		return ""
	case within == "":
		return verb + " folder"
	case within == "/to":
		return verb + " to"
	default:
		return verb + " file"
	}
}
