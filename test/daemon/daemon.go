// Package daemon runs agentrun's daemon as systemd would, for tests.
package daemon

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"agentrun.dev/internal/client"
	"agentrun.dev/internal/host/assets"
)

// Daemon is a state folder, and one daemon after the other on it.
type Daemon struct {
	// State is the folder. Whoever called New removes it.
	State string
	// Client speaks to whichever daemon runs.
	Client *client.Client
	// Flags are those of agentrun up.
	Flags []string
	// Launch starts the daemon's process. Without it that is cmd.Start.
	Launch func(cmd *exec.Cmd) error
	// Log is that of all daemons.
	Log Log

	program string
	process *os.Process
	ended   chan struct{} // closed when the process has ended, and err is set
	err     error
}

// New makes a state folder. The client is closed when the test ends.
func New(t testing.TB) *Daemon {
	t.Helper()
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{program: filepath.Join(folder, "agentrun"), Log: Log{filepath.Join(t.TempDir(), "log")}}
	if d.State, err = os.MkdirTemp("", "agentrun-state-"); err != nil { // a socket's path is short
		t.Fatal(err)
	}
	if d.Client, err = client.New(client.Config{Socket: filepath.Join(d.State, "forkd", "socket")}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Client.Close)
	return d
}

// Command is agentrun with the state folder. It is killed when ctx ends.
func (d *Daemon) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, d.program, args...)
	path := filepath.Dir(d.program) + string(os.PathListSeparator) + os.Getenv("PATH")
	cmd.Env = append(os.Environ(), "PATH="+path, "AGENTRUN_STATE="+d.State)
	return cmd
}

// Up starts a daemon, with more flags, and waits until it says that it serves.
func (d *Daemon) Up(t testing.TB, flags ...string) {
	t.Helper()
	path := filepath.Join(d.State, "notify")
	notices, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = notices.Close()
		_ = os.Remove(path)
	}()
	cmd := d.Command(context.Background(), slices.Concat([]string{"up"}, d.Flags, flags)...)
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+path)
	log, err := os.OpenFile(d.Log.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }() // the daemon has it
	cmd.Stderr = log
	launch := d.Launch
	if launch == nil {
		launch = (*exec.Cmd).Start
	}
	if err := launch(cmd); err != nil {
		t.Fatal(err)
	}
	d.process, d.ended = cmd.Process, make(chan struct{})
	go func() {
		d.err = cmd.Wait()
		close(d.ended)
	}()
	ready := make(chan string, 1)
	go func() {
		b := make([]byte, 64)
		n, _ := notices.Read(b) // closed: the daemon has ended
		ready <- string(b[:n])
	}()
	select {
	case <-d.ended:
		t.Fatalf("the daemon ended: %v\n%s", d.err, d.Log)
	case notice := <-ready:
		if notice != "READY=1" {
			t.Errorf("systemd is told %q", notice)
		}
	}
	if _, err := d.Client.Version(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// PID is that of the daemon that was started last.
func (d *Daemon) PID() int { return d.process.Pid }

// Kill ends the daemon without a word. One that has ended is left alone.
func (d *Daemon) Kill() {
	_ = d.process.Kill()
	<-d.ended
	d.Client.Close() // its connections
}

// Interrupt ends the daemon as a terminal does, and returns how it ended.
func (d *Daemon) Interrupt() error {
	_ = d.process.Signal(os.Interrupt) // one that has ended says so
	return d.Wait()
}

// Wait waits for the end of the daemon.
func (d *Daemon) Wait() error {
	<-d.ended
	return d.err
}

// Log is a file that can be read while daemons write to it.
type Log struct{ path string }

func (l Log) String() string {
	b, err := os.ReadFile(l.path)
	if err != nil {
		return err.Error()
	}
	return string(b)
}
