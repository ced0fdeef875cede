// Command gotest runs go test and summarises the run: one line per package, the
// output of failed tests, the reasons of skipped tests, and a final count. A skipped
// test fails the run unless a file allows the skip: otherwise a suite that cannot
// run its tests would look like one that passes.
//
//	go run ./scripts/gotest [-allow FILE] [-v] [-slow DURATION] -- GO-TEST-ARGUMENTS…
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		os.Exit(1) //nolint:gocritic // stop has nothing left to do
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("gotest", flag.ContinueOnError)
	allowFile := flags.String("allow", "", "file that lists tests which may be skipped: PACKAGE TEST REASON")
	verbose := flags.Bool("v", false, "print a line per test that passed, not only per package")
	slow := flags.Duration("slow", 0, "print a line per test or subtest that passed and took at least this long (0: none)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	allowed, err := readAllowed(*allowFile)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, flags.Args()...)...)
	// If go test is interrupted, it ends its tests itself; if it is killed, it
	// leaves them running.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start go test: %w", err)
	}
	s := newSummary(out, allowed)
	s.verbose, s.slow = *verbose, *slow
	readErr := readEvents(stdout, s.event)
	waitErr := cmd.Wait()
	verdict := s.close()
	if readErr != nil {
		return readErr
	}
	if verdict != nil {
		return verdict
	}
	if waitErr != nil {
		return fmt.Errorf("go test: %w", waitErr)
	}
	return nil
}

// event is a line of go test -json (go doc test2json).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of a build
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

// readEvents calls f with every event. Lines that are not events come from
// programs that bypass go test's pipes; they are treated as output.
func readEvents(r io.Reader, f func(event)) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil || e.Action == "" {
				e = event{Action: "stray", Output: string(line)}
			}
			f(e)
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read from go test: %w", err)
		}
	}
}
