package main

import (
	"bytes"
	"errors"
	"testing"

	"agentrun.dev/api/rest"
)

// TestCodePrinter: results and tracebacks are printed after the output that came
// before them, in whatever order the two arrive.
func TestCodePrinter(t *testing.T) {
	at := func(n int64) *int64 { return &n }
	result := rest.CodeEvent{Type: rest.CodeEventTypeResult, StdoutOffset: at(4), StderrOffset: at(0), Value: rest.MimeBundle{"text/plain": "42"}}
	raised := rest.CodeEvent{Type: rest.CodeEventTypeRaised, StdoutOffset: at(8), StderrOffset: at(0), Exception: &rest.CodeError{Traceback: "Traceback\n"}}
	for name, early := range map[string]bool{"events first": true, "output first": false} {
		var out bytes.Buffer // both, as on a terminal
		p := &codePrinter{traceback: true}
		p.stdout, p.stderr = counted{w: &out, after: p.flush}, counted{w: &out, after: p.flush}
		steps := []func() error{
			func() error { return p.event(result) },
			func() error { return p.event(raised) },
			func() error { _, err := p.stdout.Write([]byte("one\n")); return err },
			func() error { _, err := p.stdout.Write([]byte("two\n")); return err },
		}
		if !early {
			steps = []func() error{steps[2], steps[0], steps[3], steps[1]}
		}
		var errs []error
		for _, do := range steps {
			errs = append(errs, do())
		}
		if err := errors.Join(append(errs, p.all())...); err != nil {
			t.Fatal(err)
		}
		if want := "one\n42\ntwo\nTraceback\n"; out.String() != want {
			t.Errorf("%s: %q, not %q", name, out.String(), want)
		}
	}
	// Output that was dropped is not waited for.
	var out bytes.Buffer
	p := &codePrinter{}
	p.stdout, p.stderr = counted{w: &out, after: p.flush}, counted{w: &out, after: p.flush}
	if err := errors.Join(p.event(result), p.all()); err != nil || out.String() != "42\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
}
