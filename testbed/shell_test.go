package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A shell on a terminal: the size is passed on, also when it changes.
func TestShellHasATerminal(t *testing.T) {
	master, slave := hostPTY(t)
	resize := func(rows, cols uint16) {
		t.Helper()
		if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
			t.Fatal(err)
		}
	}
	resize(33, 101)
	ctx, cancel := context.WithTimeout(t.Context(), commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, "shell", "bash", "-c",
		`tty; stty size; until [ "$(stty size)" = "44 120" ]; do sleep 0.1; done; stty size; read line; echo "got $line"; exit 4`)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	slave.Close() // the last holder's end is then the end of reading
	lines := bufio.NewScanner(master)
	expect := func(want string) {
		t.Helper()
		var seen []string
		for lines.Scan() {
			line := strings.TrimRight(lines.Text(), "\r")
			if strings.HasPrefix(line, want) {
				return
			}
			seen = append(seen, line)
		}
		t.Fatalf("no line %q, only %q", want, seen)
	}
	expect("/dev/pts/")
	expect("33 101")
	resize(44, 120)
	expect("44 120")
	if _, err := master.WriteString("hello\r"); err != nil {
		t.Fatal(err)
	}
	expect("got hello")
	if code := exitStatus(cmd.Wait()); code != 4 {
		t.Errorf("exit code %d, want 4", code)
	}
}

func hostPTY(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return master, slave
}
