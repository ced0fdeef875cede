package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path"
	"strings"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/convert/restconv"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// execInDaemon is agentrun exec in a sandbox of the daemon.
func (o *execOptions) execInDaemon(ctx context.Context, c *client.Client, name string, argv []string, stdin io.Reader, stdout, stderr io.Writer) (err error) {
	req := rest.ExecRequest{Argv: argv, Cwd: o.workdir, User: o.user, Timeout: restconv.FromDuration(o.timeout), Tty: o.tty, OpenStdin: o.stdin}
	if len(o.env) > 0 {
		req.Env = rest.Env{}
		for _, e := range o.env {
			key, value, ok := strings.Cut(e, "=")
			if !ok {
				return fmt.Errorf("--env %q: write NAME=VALUE", e)
			}
			req.Env[key] = value
		}
	}
	out := client.Output{Stdout: stdout, Stderr: stderr}
	if !o.stdin {
		exit, err := c.Stream(ctx, name, req, out)
		if err != nil {
			return err
		}
		return exitOf(exit)
	}
	terminal, err := o.terminal(stdin)
	if err != nil {
		return err
	}
	if terminal != nil {
		rows, cols := terminal.size()
		req.Rows, req.Cols = int(rows), int(cols)
		restore, err := terminal.raw()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, restore()) }()
	}
	started, err := c.Start(ctx, name, req)
	if err != nil {
		return err
	}
	if terminal != nil {
		defer onResize(func() {
			rows, cols := terminal.size()
			_ = c.Resize(ctx, name, started.Id, int(rows), int(cols)) // it may just have ended
		})()
	}
	// Input that is typed after the program has ended is discarded.
	go func() { _ = c.WriteStdin(ctx, name, started.Id, stdin, true) }()
	exit, err := c.Attach(ctx, name, started.Id, 0, 0, out)
	if err != nil {
		return err
	}
	return exitOf(exit)
}

// exitOf is the exit code of a program that has ended.
func exitOf(e rest.ExecEvent) error {
	switch {
	case e.TimedOut:
		return exitCode(exitTimedOut)
	case e.ExitCode != nil && *e.ExitCode != 0:
		return exitCode(*e.ExitCode)
	}
	return nil
}

// onResize calls do whenever this terminal's size changes, until stop.
func onResize(do func()) (stop func()) {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGWINCH)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-changed:
				do()
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(changed)
		close(done)
	}
}

func newLogsCommand() *cobra.Command {
	var o logFlags
	cmd := &cobra.Command{
		Use:     "logs template/NAME",
		Short:   "Print what happened when a template was built",
		Example: `  agentrun logs -f template/python-agent`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			kind, name, ok := strings.Cut(args[0], "/")
			if !ok || kind != "template" {
				return fmt.Errorf("%q: write template/NAME; the output of programs is that of agentrun exec", args[0])
			}
			return o.print(cmd.Context(), name, cmd.OutOrStdout())
		},
	}
	o.add(cmd)
	return cmd
}

func newCodeCommand() *cobra.Command {
	var o daemonOptions
	var language, name string
	var text bool
	cmd := &cobra.Command{
		Use:   "code SANDBOX CODE|-",
		Short: "Run code in the language kernel of a sandbox, whose state stays",
		Long: `Run code in a language kernel of a sandbox of the daemon. What one execution defines
the next one uses, and forks inherit. The value of the last expression is printed
after the output. The exit code is 1 if there was an exception, and that of
sys.exit otherwise. With - the code is read from standard input.

--text leaves the choice between Python and a shell command to the sandbox.`,
		Example: `  agentrun code agent-session-1 'x = 41'
  agentrun code agent-session-1 'x + 1'`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: o.complete(first, "sandboxes"),
		RunE: func(cmd *cobra.Command, args []string) error {
			source := args[1]
			if source == "-" {
				b, err := io.ReadAll(cmd.InOrStdin())
				if err != nil {
					return err
				}
				source = string(b)
			}
			req := rest.CodeRequest{Code: source, Context: name, Language: rest.CodeRequestLanguage(language)}
			if text {
				req.Mode = rest.CodeModeText
			}
			return o.with(func(c *client.Client) error {
				return runCode(cmd.Context(), c, args[0], req, cmd.OutOrStdout(), cmd.ErrOrStderr())
			})
		},
	}
	f := cmd.Flags()
	o.flags(f)
	f.StringVarP(&language, "language", "l", "", "python, bash or node (default: that of the context, or python)")
	f.StringVar(&name, "context", "", "context to run it in (default: the language's own)")
	f.BoolVar(&text, "text", false, "run it as Python or as a command, whichever it is")
	return cmd
}

func runCode(ctx context.Context, c *client.Client, name string, req rest.CodeRequest, stdout, stderr io.Writer) error {
	p := &codePrinter{traceback: req.Mode != rest.CodeModeText} // of a text it is on stderr
	p.stdout, p.stderr = counted{w: stdout, after: p.flush}, counted{w: stderr, after: p.flush}
	end, err := c.StreamCode(ctx, name, req, client.Output{Stdout: &p.stdout, Stderr: &p.stderr}, p.event)
	if err = errors.Join(err, p.all()); err != nil {
		return err
	}
	switch {
	case end.Reason != "":
		return fmt.Errorf("the kernel has died: %s", end.Reason)
	case end.TimedOut:
		return exitCode(exitTimedOut)
	case end.ExitCode != nil && *end.ExitCode != 0:
		return exitCode(*end.ExitCode)
	}
	return nil
}

// codePrinter prints the output and the results of an execution in their original
// order: an event says how much output came before it.
type codePrinter struct {
	stdout, stderr counted
	traceback      bool
	waiting        []rest.CodeEvent
}

// counted is a writer that counts its bytes.
type counted struct {
	w     io.Writer
	n     int64
	after func() error
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	if err == nil {
		err = c.after()
	}
	return n, err
}

func (p *codePrinter) event(e rest.CodeEvent) error {
	switch e.Type {
	case rest.CodeEventTypeResult, rest.CodeEventTypeDisplay, rest.CodeEventTypeRaised:
		p.waiting = append(p.waiting, e)
	}
	return p.flush()
}

// flush prints the events whose turn it is.
func (p *codePrinter) flush() error {
	for len(p.waiting) > 0 {
		e := p.waiting[0]
		if e.StdoutOffset != nil && *e.StdoutOffset > p.stdout.n || e.StderrOffset != nil && *e.StderrOffset > p.stderr.n {
			return nil
		}
		p.waiting = p.waiting[1:]
		if err := p.show(e); err != nil {
			return err
		}
	}
	return nil
}

// all prints the remaining events: some of the output before them may have been
// dropped.
func (p *codePrinter) all() error {
	for _, e := range p.waiting {
		if err := p.show(e); err != nil {
			return err
		}
	}
	return nil
}

func (p *codePrinter) show(e rest.CodeEvent) (err error) {
	if e.Type != rest.CodeEventTypeRaised {
		_, err = fmt.Fprintln(p.stdout.w, e.Value["text/plain"])
	} else if p.traceback {
		_, err = io.WriteString(p.stderr.w, e.Exception.Traceback)
	}
	return err
}

func newCopyCommand() *cobra.Command {
	var o daemonOptions
	cmd := &cobra.Command{
		Use:   "cp SANDBOX:PATH FILE | cp FILE SANDBOX:PATH",
		Short: "Copy a file out of a sandbox or into one",
		Long: `Copy a file out of a sandbox of the daemon or into one. A path that is not absolute
begins at the sandbox's working folder; - is standard input or output.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return copyFile(cmd.Context(), c, args[0], args[1], cmd.InOrStdin(), cmd.OutOrStdout())
			})
		},
	}
	o.flags(cmd.Flags())
	return cmd
}

func copyFile(ctx context.Context, c *client.Client, from, to string, stdin io.Reader, stdout io.Writer) (err error) {
	fromBox, fromPath, out := strings.Cut(from, ":")
	toBox, toPath, in := strings.Cut(to, ":")
	switch {
	case in == out:
		return errors.New("cp: one of the two is SANDBOX:PATH, the other a file here")
	case out && to == "-":
		return c.ReadFile(ctx, fromBox, fromPath, stdout)
	case out:
		if info, err := os.Stat(to); err == nil && info.IsDir() {
			to = path.Join(to, path.Base(fromPath))
		}
		f, err := os.Create(to)
		if err != nil {
			return err
		}
		return errors.Join(c.ReadFile(ctx, fromBox, fromPath, f), f.Close())
	}
	source, mode := stdin, ""
	if from != "-" {
		f, err := os.Open(from)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }() // only read
		info, err := f.Stat()
		if err != nil {
			return err
		}
		source, mode = f, fmt.Sprintf("%04o", info.Mode().Perm())
	}
	_, err = c.WriteFile(ctx, toBox, toPath, mode, source)
	return err
}
