package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// TestBuildTimeout: if init commands, ready check and warm-up together take too long, they
// are cut off. The error names the step and the setting to change.
func TestBuildTimeout(t *testing.T) {
	for what, spec := range map[string]sandbox.TemplateSpec{
		"init command 1": {Init: []string{"sleep 1000"}},
		"init command 2": {Init: []string{"true", "sleep 1000"}},
		"ready check":    {Ready: &sandbox.ReadyCheck{Command: "false", Timeout: time.Hour}},
		"warm-up":        {Warmup: &sandbox.Program{Language: "bash", Text: "sleep 1000"}},
	} {
		t.Run(what, func(t *testing.T) {
			spec.BuildTimeout = time.Second
			r := &run{agent: startAgent(t), log: io.Discard, workdir: t.TempDir()}
			err := within(t.Context(), spec, func(ctx context.Context) error {
				_, err := r.all(ctx, node.BuildRequest{Spec: spec, Stage: sandbox.AfterReady}, nil)
				return err
			})
			if err == nil || !strings.Contains(err.Error(), what) || !strings.Contains(err.Error(), "raise buildTimeout") {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestWithin: a step that ends in time, or that its caller cuts off, keeps its own
// error.
func TestWithin(t *testing.T) {
	failed := errors.New("it failed")
	if err := within(t.Context(), sandbox.TemplateSpec{}, func(ctx context.Context) error {
		if until, ok := ctx.Deadline(); !ok || time.Until(until) > sandbox.DefaultBuildTimeout || time.Until(until) < sandbox.DefaultBuildTimeout-time.Minute {
			t.Errorf("it may take until %v", until)
		}
		return failed
	}); err != failed {
		t.Errorf("%v", err)
	}
	cut, cancel := context.WithCancel(t.Context())
	if err := within(cut, sandbox.TemplateSpec{}, func(ctx context.Context) error {
		cancel()
		return ctx.Err()
	}); err != context.Canceled {
		t.Errorf("%v", err)
	}
}

// silentAgent never answers when code is to be run.
type silentAgent struct{ guestrpc.Handler }

func (silentAgent) CodeRun(ctx context.Context, _ *guestrpc.CodeRunRequest, _ *guestrpc.CodeStream) (guestrpc.CodeStatus, error) {
	<-ctx.Done()
	return guestrpc.CodeStatus{}, ctx.Err()
}

// TestRehearsalEnds: an interpreter that never answers ends its fork, and no call waits
// for it for ever.
func TestRehearsalEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		go func() { _ = guestrpc.Serve(context.Background(), theirs, silentAgent{}) }()
		agent, err := guestrpc.NewClient(t.Context(), ours)
		if err != nil {
			t.Fatal(err)
		}
		defer agent.Close()
		begin := time.Now()
		err = (&Builder{}).Rehearse(t.Context(), sandbox.TemplateSpec{Warmup: &sandbox.Program{Language: "python"}}, inside{agent: agent})
		if took := time.Since(begin); err == nil || took != rehearsalPatience {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// ending is a sandbox that has ended, or has not.
type ending struct {
	inside
	done chan struct{}
}

func (s ending) Done() <-chan struct{} { return s.done }
func (s ending) Wait() error           { return fmt.Errorf("%w: its helper was killed", engine.ErrEnded) }

// TestWhyCutOff: the error of a build whose machine has ended says so, as that is no error of
// the template.
func TestWhyCutOff(t *testing.T) {
	agent := startAgent(t)
	failed := errors.New("session closed")
	sb := ending{inside{agent: agent}, make(chan struct{})}
	if err := whyCutOff(t.Context(), sb, failed); errors.Is(err, engine.ErrEnded) {
		t.Errorf("while the agent is there: %v", err)
	}
	if err := agent.Close(); err != nil {
		t.Fatal(err)
	}
	close(sb.done)
	if err := whyCutOff(t.Context(), sb, failed); !errors.Is(err, engine.ErrEnded) || !errors.Is(err, failed) {
		t.Errorf("when both are gone: %v", err)
	}
	if err := whyCutOff(t.Context(), sb, nil); err != nil {
		t.Errorf("a build that is made: %v", err)
	}
}

type answerOf bool

func (a answerOf) Error() string   { return "an answer" }
func (a answerOf) Temporary() bool { return bool(a) }

// TestUnavailable: a registry that is away for a moment is told from one that refuses.
func TestUnavailable(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{errors.New("MANIFEST_UNKNOWN"), false},
		{fmt.Errorf("pull: %w", syscall.ECONNREFUSED), true},
		{fmt.Errorf("pull: %w", io.ErrUnexpectedEOF), true},
		{fmt.Errorf("pull: %w", answerOf(true)), true},
		{fmt.Errorf("pull: %w", answerOf(false)), false},
		{fmt.Errorf("pull: %w", context.Canceled), false},
		{&net.DNSError{Err: "no such host", IsNotFound: true}, false},
		{&net.DNSError{Err: "server misbehaving", IsTemporary: true}, true},
	} {
		if got := unavailable(c.err); got != c.want {
			t.Errorf("%v: %t", c.err, got)
		}
	}
}

// TestBuildsGiveWay: the machine of a build leaves the processors to sandboxes.
func TestBuildsGiveWay(t *testing.T) {
	l := machine(sandbox.TemplateSpec{MilliCPUs: 700}, nil).Limits
	if !l.Background || l.MilliCPUs != 700 {
		t.Errorf("a template is built with %+v", l)
	}
}
