// Package daemon runs agentrun's daemon as systemd would, for tests.
package daemon

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"agentrun.dev/internal/client"
	"agentrun.dev/internal/host/assets"
	"golang.org/x/sys/unix"
)

// Daemon is a state folder, on which daemons run one after another.
type Daemon struct {
	// State is the folder. The caller of New removes it.
	State string
	// Client talks to the daemon that is running.
	Client *client.Client
	// Flags are the flags of agentrun up.
	Flags []string
	// Launch starts the daemon's process. If it is nil, cmd.Start does.
	Launch func(cmd *exec.Cmd) error
	// Log is the log of all daemons.
	Log Log

	programs string   // their folder
	process  *process // of the latest daemon
}

// process is the process of one daemon.
type process struct {
	*os.Process
	ended chan struct{} // closed when the process has ended and err is set
	err   error
}

// New makes a state folder. The client is closed when the test ends.
func New(t testing.TB) *Daemon {
	t.Helper()
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{programs: folder, Log: Log{filepath.Join(t.TempDir(), "log")}}
	if d.State, err = os.MkdirTemp("", "agentrun-state-"); err != nil { // a socket's path is short
		t.Fatal(err)
	}
	if d.Client, err = client.New(client.Config{Socket: filepath.Join(d.State, "forkd", "socket")}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Client.Close)
	return d
}

// Command returns a command that runs agentrun with the state folder. It is
// killed when ctx ends.
func (d *Daemon) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(d.programs, "agentrun"), args...)
	path := d.programs + string(os.PathListSeparator) + os.Getenv("PATH")
	cmd.Env = append(os.Environ(), "PATH="+path, "AGENTRUN_STATE="+d.State, assets.EnvFolder+"="+d.programs)
	return cmd
}

// OwnPrograms puts the programs into the state folder. Then the processes of this
// daemon and its sandboxes can be distinguished from others by the folder of their
// program.
func (d *Daemon) OwnPrograms(t testing.TB) {
	t.Helper()
	d.programs = d.install(t, "programs", d.programs)
}

// Install makes daemons that start from now on use programs of another AgentRun: those that
// folder has. The other programs are those of this AgentRun.
func (d *Daemon) Install(t testing.TB, name, folder string) {
	t.Helper()
	main, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	d.programs = d.install(t, "programs-"+name, folder, main)
}

// install puts programs into a folder of the state folder, each from the first of the
// folders that has it.
func (d *Daemon) install(t testing.TB, name string, from ...string) (own string) {
	t.Helper()
	own = filepath.Join(d.State, name)
	if err := os.MkdirAll(own, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []assets.Asset{"agentrun", assets.Kernel, assets.GuestAgent, assets.VMM, assets.Netd, assets.GVisorHelper} {
		for _, folder := range from {
			err := link(filepath.Join(folder, string(name)), filepath.Join(own, string(name)))
			if err == nil {
				break
			}
			if !errors.Is(err, fs.ErrNotExist) { // the program of an engine may be missing
				t.Fatal(err)
			}
		}
	}
	return own
}

// link gives a program another name, unless the name exists, or copies the
// program to another file system.
func link(from, to string) error {
	err := os.Link(from, to)
	switch {
	case errors.Is(err, fs.ErrExist):
		return nil
	case errors.Is(err, unix.EXDEV):
		return copyProgram(from, to)
	}
	return err
}

func copyProgram(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o755) //nolint:gosec // it is to be executed, by users without a name too
}

// Up starts a daemon, with additional flags, and waits until it says that it
// serves.
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
	defer func() { _ = log.Close() }() // the daemon has its own descriptor
	cmd.Stderr = log
	launch := d.Launch
	if launch == nil {
		launch = (*exec.Cmd).Start
	}
	if err := launch(cmd); err != nil {
		t.Fatal(err)
	}
	// The previous daemon may still be ending, after its own command has told
	// it to.
	p := &process{Process: cmd.Process, ended: make(chan struct{})}
	d.process = p
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	ready := make(chan string, 1)
	go func() {
		b := make([]byte, 64)
		n, _ := notices.Read(b) // closed: the daemon has ended
		ready <- string(b[:n])
	}()
	select {
	case <-p.ended:
		t.Fatalf("the daemon ended: %v\n%s", p.err, d.Log)
	case notice := <-ready:
		if notice != "READY=1" {
			t.Errorf("systemd is told %q", notice)
		}
	}
	if _, err := d.Client.Version(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// PID returns the process id of the latest daemon.
func (d *Daemon) PID() int { return d.process.Pid }

// Kill kills the daemon with SIGKILL. It does nothing if the daemon has ended.
func (d *Daemon) Kill() {
	_ = d.process.Kill()
	<-d.process.ended
	d.Client.Close() // its connections are useless now
}

// Interrupt ends the daemon as Ctrl-C in a terminal does, and returns the error
// that it ended with.
func (d *Daemon) Interrupt() error {
	_ = d.process.Signal(os.Interrupt) // Wait reports a daemon that has ended already
	return d.Wait()
}

// Wait waits for the end of the daemon.
func (d *Daemon) Wait() error {
	<-d.process.ended
	return d.process.err
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
