package template

import (
	"bytes"
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/agent"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// inside is a sandbox of which only the agent is used.
type inside struct {
	engine.Sandbox
	agent *guestrpc.Client
}

func (s inside) Agent() *guestrpc.Client { return s.agent }

// startAgent serves a guest agent in this process.
func startAgent(t *testing.T) *guestrpc.Client {
	t.Helper()
	processes := agent.NewProcesses(agent.Config{})
	server := &agent.Server{Processes: processes, Version: "test", Log: func(msg string) { t.Log(msg) }}
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := agent.ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		_ = l.Close()
		if err := <-served; !errors.Is(err, agent.ErrClosed) {
			t.Error(err)
		}
		processes.Close()
	})
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	agent, err := guestrpc.Dial(conn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = agent.Close() })
	return agent
}

// TestRehearse: the rehearsal uses the interpreter that was warmed up, shows nothing,
// and leaves its state as it is.
func TestRehearse(t *testing.T) {
	for language, code := range map[string]struct{ warmup, ask string }{
		"python": {"x = 41", "print(x)"},
		"bash":   {"x=41; false", "echo $x"},
		"node":   {"var x = 41", "console.log(x)"},
	} {
		t.Run(language, func(t *testing.T) {
			agent := startAgent(t)
			run := func(source string) (out string, results int) {
				t.Helper()
				var b bytes.Buffer
				st, err := agent.RunCode(t.Context(), guestrpc.CodeRunRequest{Language: language, Source: source}, &b, &b, func(e guestrpc.CodeEvent) error {
					if e.Kind != guestrpc.CodeEventBegun {
						results++
					}
					return nil
				})
				if err != nil || st.State == guestrpc.CodeDied {
					t.Fatalf("%q: %+v, %v", source, st, err)
				}
				return b.String(), results
			}
			run(code.warmup)
			before, _ := agent.ListContexts(t.Context())
			spec := sandbox.TemplateSpec{Warmup: &sandbox.Program{Language: language, Text: code.warmup}}
			if err := (&Builder{}).Rehearse(t.Context(), spec, inside{agent: agent}); err != nil {
				t.Fatal(err)
			}
			if after, err := agent.ListContexts(t.Context()); err != nil || len(after) != 1 || len(before) != 1 || after[0].PID != before[0].PID {
				t.Errorf("kernels %+v, before %+v, %v", after, before, err)
			}
			if out, results := run(nothing[language]); out != "" || results != 0 {
				t.Errorf("%q says %q and has %d results", nothing[language], out, results)
			}
			if out, _ := run(code.ask); out != "41\n" {
				t.Errorf("after a rehearsal: %q", out)
			}
		})
	}
}

// TestRehearseNothing: without warm-up code no interpreter is started, and an agent that
// is gone is an error only where there is something to do.
func TestRehearseNothing(t *testing.T) {
	agent := startAgent(t)
	sb := inside{agent: agent}
	if err := (&Builder{}).Rehearse(t.Context(), sandbox.TemplateSpec{}, sb); err != nil {
		t.Fatal(err)
	}
	if all, err := agent.ListContexts(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
	if err := agent.Close(); err != nil {
		t.Fatal(err)
	}
	if err := (&Builder{}).Rehearse(t.Context(), sandbox.TemplateSpec{Warmup: &sandbox.Program{Language: "python"}}, sb); err == nil {
		t.Error("a rehearsal without an agent")
	}
}
