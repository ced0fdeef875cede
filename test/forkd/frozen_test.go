package forkd

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/pick"
	"golang.org/x/sys/unix"
)

// freeze makes a sandbox stop answering. On gVisor a program inside stops the agent. The
// kernel of a microVM does not allow that, so the vmm process is stopped.
func (n *node) freeze(name string) {
	n.t.Helper()
	if kind, _ := pick.Choose(pick.Auto); kind == pick.MicroVM {
		machines, err := n.machines()
		if err != nil {
			n.t.Fatal(err)
		}
		for dir, r := range machines {
			if r.Hostname != name {
				continue
			}
			pid, err := folder.Folder(filepath.Join(n.State, "forkd", "machines", dir)).Process()
			if err = errors.Join(err, unix.Kill(pid, unix.SIGSTOP)); err != nil {
				n.t.Fatal(err)
			}
			return
		}
		n.t.Fatalf("%s has no machine", name)
	}
	// An answer to this call may arrive or not.
	ctx, cancel := context.WithTimeout(n.t.Context(), 2*time.Second)
	defer cancel()
	_, _ = n.Client.RunCode(ctx, name, rest.CodeRequest{Code: "import os, signal; os.kill(1, signal.SIGSTOP)"})
	again, cancel := context.WithTimeout(n.t.Context(), 2*time.Second)
	defer cancel()
	if r, err := n.Client.RunCode(again, name, rest.CodeRequest{Code: "1"}); err == nil {
		n.t.Fatalf("%s is not frozen: %+v", name, r)
	}
}

// TestFrozen: sandboxes that do not answer can be killed during any operation on them. They
// do not keep the next daemon from serving, nor clients from using other sandboxes.
func TestFrozen(t *testing.T) {
	n := newNode(t)
	n.OwnPrograms(t)
	n.up()
	n.template(pythonImage(t))
	n.settles()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	frozen := map[string]func(context.Context, string) error{
		"idle": nil,
		"forked": func(ctx context.Context, name string) error {
			_, err := n.Client.Fork(ctx, name, rest.ForkCreate{Name: "f", Replicas: 2}, "")
			return err
		},
		"hibernated": func(ctx context.Context, name string) error {
			_, err := n.Client.Do(ctx, name, client.Hibernate)
			return err
		},
		"used": func(ctx context.Context, name string) error {
			_, err := n.Client.RunCode(ctx, name, rest.CodeRequest{Code: "1"})
			return err
		},
	}
	claim := func(name string) {
		t.Helper()
		if _, err := n.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: "pool"}, ""); err != nil {
			t.Fatal(err)
		}
	}
	works := func() {
		t.Helper()
		if r, err := n.Client.RunCode(ctx, "good", rest.CodeRequest{Code: "print(warm)"}); err != nil || r.Stdout != "1\n" {
			t.Errorf("the one that answers: %+v, %v", r, err)
		}
	}
	claim("good")
	for _, phase := range []string{"before", "after"} { // the restart
		type call struct {
			what string
			done chan error
		}
		var calls []call
		for what, do := range frozen {
			claim(what)
			n.freeze(what)
			if do != nil && phase == "before" {
				c := call{what, make(chan error, 1)}
				calls = append(calls, c)
				go func() { c.done <- do(ctx, what) }()
			}
		}
		works()
		if phase == "after" {
			n.Kill()
			n.up() // until it serves
			works()
			claim("new")
			if _, err := n.Client.Kill(ctx, "new"); err != nil {
				t.Error(err)
			}
		}
		for what := range frozen {
			if s, err := n.Client.Kill(ctx, what); err != nil || s.State != rest.SandboxStateEnded {
				t.Errorf("%s a restart, %s: %+v, %v", phase, what, s, err)
			}
		}
		for _, c := range calls {
			// A capture may succeed, because it may not need the agent.
			if err := <-c.done; ctx.Err() != nil {
				t.Errorf("%s: nobody was told that it was killed: %v", c.what, err)
			}
		}
		n.settles()
	}
	works()
	if _, err := n.Client.Kill(ctx, "good"); err != nil {
		t.Error(err)
	}
	n.settles()
	n.end(new(traces))
}
