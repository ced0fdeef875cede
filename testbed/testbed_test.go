package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// binary is the testbed under test, with a VM of its own.
var binary string

func TestMain(m *testing.M) {
	code, err := withMachine(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func withMachine(m *testing.M) (int, error) {
	if os.Getenv("AGENTRUN_TESTBED") != "" {
		return 0, nil // the runner is tested from outside, not by itself
	}
	dir, err := os.MkdirTemp("", "testbed-test-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	// A state folder of its own, because tests of other packages may be using the
	// usual one.
	os.Setenv("AGENTRUN_CACHE", dir)
	binary = filepath.Join(dir, "bin", "testbed")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("build the testbed: %w\n%s", err, out)
	}
	defer exec.Command(binary, "stop").Run()
	begin := time.Now()
	if out, err := exec.Command(binary, "start", "--memory", "2G").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("start the machine: %w\n%s", err, out)
	}
	fmt.Fprintf(os.Stderr, "machine up after %v\n", time.Since(begin).Round(10*time.Millisecond))
	return m.Run(), nil
}

// commandLimit is far above the time that any of the commands takes on a busy host.
// It makes a hang end the VM with the test.
const commandLimit = 2 * time.Minute

// within returns a command that runs argv in the VM.
func within(t *testing.T, argv ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), commandLimit)
	t.Cleanup(cancel)
	return exec.CommandContext(ctx, binary, append([]string{"exec", "--"}, argv...)...)
}

// output runs argv in the VM and returns its stdout.
func output(t *testing.T, argv ...string) string {
	t.Helper()
	var errs bytes.Buffer
	cmd := within(t, argv...)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%q: %v\n%s%s", argv, err, out, errs.Bytes())
	}
	return string(out)
}

func exitStatus(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		return -1
	}
	return 0
}

func TestExitCodes(t *testing.T) {
	cases := []struct {
		argv []string
		want int
	}{
		{[]string{"true"}, 0},
		{[]string{"sh", "-c", "exit 7"}, 7},
		{[]string{"sh", "-c", "kill -9 $$"}, 128 + 9},
		{[]string{"no-such-program"}, 127},
		{[]string{"/etc/passwd"}, 126},
	}
	for _, c := range cases {
		if got := exitStatus(within(t, c.argv...).Run()); got != c.want {
			t.Errorf("%q: exit code %d, want %d", c.argv, got, c.want)
		}
	}
}

func TestOutputsAreSeparate(t *testing.T) {
	var out, errs bytes.Buffer
	cmd := within(t, "sh", "-c", "echo out; echo err >&2")
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if out.String() != "out\n" || errs.String() != "err\n" {
		t.Errorf("stdout %q, stderr %q", out.String(), errs.String())
	}
}

func TestFolderAndEnvironment(t *testing.T) {
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	cmd := within(t, "sh", "-c", `pwd; echo "$AGENTRUN_X,$GOX,$SECRET,$AGENTRUN_TESTBED"`)
	cmd.Env = append(os.Environ(), "AGENTRUN_X=a b", "GOX=c", "SECRET=d")
	out, err := cmd.Output()
	if want := dir + "\na b,c,,1\n"; err != nil || string(out) != want {
		t.Errorf("%q (%v), want %q", out, err, want)
	}
}

// 64 MiB each way, compared by hash: nothing may be lost, added or reordered.
func TestStreamsAreByteExact(t *testing.T) {
	const size = 64 << 20
	want := sha256.New()
	cmd := within(t, "cat")
	cmd.Stdin = io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), want)
	got := sha256.New()
	counter := &countingWriter{w: got}
	cmd.Stdout = counter
	begin := time.Now()
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if counter.n != size || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Errorf("%d bytes came back, and not the ones sent", counter.n)
	}
	t.Logf("64 MiB in and out in %v", time.Since(begin).Round(time.Millisecond))
}

type countingWriter struct {
	w io.Writer
	n int
}

func (c *countingWriter) Write(p []byte) (int, error) {
	c.n += len(p)
	return c.w.Write(p)
}

// A process that does not read its stdin must still receive signals.
func TestSignalWhileStdinIsFull(t *testing.T) {
	cmd := within(t, "sh", "-c", `trap "echo interrupted; exit 9" INT; echo ready; sleep 1000 & wait`)
	cmd.Stdin = rand.NewChaCha8([32]byte{2}) // endless
	cmd.WaitDelay = time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(out)
	if line, err := r.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q (%v)", line, err)
	}
	if err := cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if line, err := r.ReadString('\n'); line != "interrupted\n" {
		t.Fatalf("%q (%v)", line, err)
	}
	if code := exitStatus(cmd.Wait()); code != 9 {
		t.Errorf("exit code %d, want 9", code)
	}
}

// Two commands are inside at the same time: each waits for the other.
func TestTwoAtOnce(t *testing.T) {
	dir := "/run/" + t.Name()
	defer output(t, "rm", "-r", dir)
	meet := func(me, other string) error {
		script := fmt.Sprintf(`mkdir -p %[1]s; mkfifo %[1]s/%[2]s %[1]s/%[3]s 2>/dev/null
			if [ %[2]s = a ]; then echo hi >%[1]s/a; cat %[1]s/b; else cat %[1]s/a; echo hi >%[1]s/b; fi`, dir, me, other)
		return within(t, "timeout", "60", "sh", "-c", script).Run()
	}
	done := make(chan error, 2)
	go func() { done <- meet("a", "b") }()
	go func() { done <- meet("b", "a") }()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestMoreCommandsThanPorts(t *testing.T) {
	const n = 20
	done := make(chan error, n)
	for i := range n {
		go func() {
			out, err := within(t, "echo", fmt.Sprint(i)).Output()
			if err == nil && string(out) != fmt.Sprintln(i) {
				err = fmt.Errorf("command %d wrote %q", i, out)
			}
			done <- err
		}()
	}
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// A killed client's processes die, including those that left its process group,
// session and cgroup. The port serves the next client.
func TestKilledClientLeavesNothing(t *testing.T) {
	lock := "/run/" + t.Name()
	hold := `
		setsid sh -c "mkdir -p /sys/fs/cgroup/elsewhere; echo \$\$ >/sys/fs/cgroup/elsewhere/cgroup.procs; exec flock $0 sh -c 'echo held; exec sleep 1000'" &
		exec yes`
	for range 3 {
		cmd := within(t, "bash", "-c", hold, lock)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// In the middle of endless output.
		for s := bufio.NewScanner(out); s.Scan() && s.Text() != "held"; {
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		// The lock is free once its holder is dead.
		output(t, "flock", "-w", "30", lock, "true")
	}
	for range 16 { // on any port
		if got := output(t, "echo", "fine"); got != "fine\n" {
			t.Fatalf("after a killed client: %q", got)
		}
	}
	output(t, "rmdir", "/sys/fs/cgroup/elsewhere")
}

// Processes that a command leaves running do not outlive it.
func TestNothingOutlivesTheCommand(t *testing.T) {
	lock := "/run/" + t.Name()
	output(t, "sh", "-c", fmt.Sprintf("setsid flock %[1]s sleep 1000 & until ! flock -n %[1]s true; do :; done", lock))
	output(t, "flock", "-n", lock, "true")
}

func TestHostFilesAreCurrent(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if code := exitStatus(within(t, "test", "-e", file).Run()); code != 1 {
		t.Fatalf("a file which is not there yet: test -e gave %d", code)
	}
	for _, content := range []string{"one", "two!"} {
		if err := os.WriteFile(file+".new", []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
		if got := output(t, "cat", file); got != content {
			t.Errorf("inside the file holds %q, want %q", got, content)
		}
	}
	// Writes stay inside, except in the results folder.
	output(t, "sh", "-c", "echo changed >"+file)
	if b, err := os.ReadFile(file); err != nil || string(b) != "two!" {
		t.Errorf("the host's file became %q (%v)", b, err)
	}
	results := filepath.Join("..", "build", "out")
	mine, err := os.MkdirTemp(results, "testbed-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(mine)
	output(t, "sh", "-c", "echo result >"+filepath.Join(mine, "result"))
	if b, err := os.ReadFile(filepath.Join(mine, "result")); err != nil || string(b) != "result\n" {
		t.Errorf("the result is %q (%v)", b, err)
	}
}

// check opens /dev/kvm and asks for KVM_GET_API_VERSION; only 12 is "hardware".
func TestKVMInside(t *testing.T) {
	if got := output(t, binary, "check"); got != "hardware\n" {
		t.Errorf("testbed check inside: %q", got)
	}
}

func TestMachineIsComplete(t *testing.T) {
	script := `set -e
		test -c /dev/kvm; test -c /dev/net/tun; test -c /dev/fuse; test -d /dev/shm
		for c in cpu memory io pids cpuset; do grep -qw $c /sys/fs/cgroup/cgroup.subtree_control; done
		test "$(ulimit -n)" -ge 65536
		unshare --user --map-root-user --mount true
		cat /sys/devices/system/clocksource/clocksource0/current_clocksource
		grep -c UP /sys/class/net/lo/operstate || cat /sys/class/net/lo/flags`
	if got := output(t, "bash", "-c", script); !strings.HasPrefix(got, "tsc\n") || !strings.Contains(got, "0x9") {
		t.Errorf("clock source and loopback: %q", got)
	}
}
