package main

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
	"github.com/spf13/pflag"
	"golang.org/x/term"
)

// execOptions are the flags of commands that run a program in a sandbox.
type execOptions struct {
	env     []string
	workdir string
	user    string
	timeout time.Duration
	stdin   bool
	tty     bool
}

func (o *execOptions) flags(f *pflag.FlagSet) {
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment variable NAME=VALUE for the command (repeatable)")
	f.StringVarP(&o.workdir, "workdir", "w", "", "folder the command starts in (default: the user's home)")
	f.StringVarP(&o.user, "user", "u", "", "user the command runs as: NAME, UID, or UID:GID (default: root)")
	f.DurationVar(&o.timeout, "timeout", 0, "kill the command after this long, such as 30s")
	f.BoolVarP(&o.stdin, "interactive", "i", false, "pass this terminal's input on to the command")
	f.BoolVarP(&o.tty, "tty", "t", false, "give the command a terminal")
}

// exec runs the command in a guest and streams its input and output.
func (o *execOptions) exec(ctx context.Context, agent *guestrpc.Client, argv []string, stdin io.Reader, stdout, stderr io.Writer) (status guestrpc.ExitStatus, err error) {
	req := guestrpc.ExecRequest{
		Argv: argv, Env: o.env, Workdir: o.workdir, User: o.user,
		Timeout: o.timeout, TTY: o.tty, Stdin: o.stdin,
	}
	terminal, err := o.terminal(stdin)
	if err != nil {
		return status, err
	}
	if terminal != nil {
		req.Rows, req.Cols = terminal.size()
		restore, err := terminal.raw()
		if err != nil {
			return status, err
		}
		defer func() { err = errors.Join(err, restore()) }()
	}
	if !o.stdin {
		stdin = nil
	}
	x, err := agent.Exec(ctx, req)
	if err != nil {
		return status, err
	}
	defer func() { _ = x.Close() }()
	if terminal != nil {
		defer terminal.follow(ctx, x)()
	}
	return x.Copy(stdin, stdout, stderr)
}

// terminal is the local terminal behind an interactive session.
type terminal struct{ fd int }

// terminal returns nil unless the command gets a terminal and ours feeds it.
func (o *execOptions) terminal(stdin io.Reader) (*terminal, error) {
	f, ok := stdin.(*os.File)
	if !o.tty || !o.stdin || !ok {
		return nil, nil
	}
	if !term.IsTerminal(int(f.Fd())) {
		return nil, errors.New("-t with -i needs a terminal, but the input is none: leave -t out")
	}
	return &terminal{fd: int(f.Fd())}, nil
}

func (t *terminal) size() (rows, cols uint16) {
	c, r, err := term.GetSize(t.fd)
	if err != nil || r <= 0 || c <= 0 || r > 0xffff || c > 0xffff {
		return 24, 80
	}
	return uint16(r), uint16(c)
}

// raw hands every key to the guest, until restore.
func (t *terminal) raw() (restore func() error, err error) {
	old, err := term.MakeRaw(t.fd)
	if err != nil {
		return nil, err
	}
	return func() error { return term.Restore(t.fd, old) }, nil
}

// follow keeps the guest's terminal as large as ours, until stop.
func (t *terminal) follow(ctx context.Context, x *guestrpc.AttachedExec) (stop func()) {
	return onResize(func() {
		rows, cols := t.size()
		_ = x.Resize(ctx, rows, cols) // the process may just have ended
	})
}
