// Package network tests connected sandboxes: a real daemon with real sandboxes
// in a small internet of the test's own.
package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/test/daemon"
	"agentrun.dev/test/network/world"
)

// site is a daemon in a world.
type site struct {
	*world.World
	daemon *daemon.Daemon
	state  string // its folder
	client *client.Client
	memory string // of sandboxes
}

// patience is the limit for one command on a busy machine, which may emulate
// another.
const patience = 5 * time.Minute

// settings are the network settings of the node, for the file that --network
// names.
const settings = "upstreams: [25.1.113.53]\n"

// newSite starts a daemon on the host of a world.
func newSite(t *testing.T, flags ...string) *site {
	t.Helper()
	d := daemon.New(t)
	t.Cleanup(func() {
		if err := os.RemoveAll(d.State); err != nil {
			t.Error(err)
		}
	})
	s := &site{World: world.New(t), daemon: d, state: d.State, client: d.Client, memory: "128Mi"}
	// The servers that receive secrets have certificates of the world.
	file, roots := filepath.Join(d.State, "network.yaml"), filepath.Join(d.State, "roots.pem")
	if err := errors.Join(os.WriteFile(roots, s.Authority(), 0o600), os.WriteFile(file, []byte(settings+"injectRoots: "+roots+"\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	d.Flags, d.Launch = append([]string{"--network", file, "--log-format", "text"}, flags...), s.Start
	d.Up(t)
	t.Cleanup(func() { s.end(t) })
	return s
}

// end kills all sandboxes and ends the daemon.
func (s *site) end(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	list, err := s.client.Sandboxes(ctx, false)
	for _, b := range list {
		_, killErr := s.client.Kill(ctx, b.Name)
		err = errors.Join(err, killErr)
	}
	if err := errors.Join(err, s.daemon.Interrupt()); err != nil {
		t.Error(err)
	}
	if t.Failed() {
		t.Logf("the daemon:\n%s", s.daemon.Log)
	}
}

// agentrun runs a command of agentrun and returns its output.
func (s *site) agentrun(t *testing.T, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := s.daemon.Command(ctx, args...).CombinedOutput()
	return string(out), err
}

// must is agentrun for commands that must succeed.
func (s *site) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := s.agentrun(t, args...)
	if err != nil {
		t.Fatalf("agentrun %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// apply applies YAML.
func (s *site) apply(t *testing.T, text string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "objects.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := s.agentrun(t, "apply", "-f", path); err != nil {
		t.Fatalf("apply: %v\n%s\n%s", err, out, s.buildLogs(t))
	}
}

// buildLogs returns the logs of all templates' builds.
func (s *site) buildLogs(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	list, err := s.client.Templates(t.Context())
	for _, tpl := range list {
		said, logErr := s.agentrun(t, "logs", "template/"+tpl.Name)
		fmt.Fprintf(&out, "%s: %v\n%s\n", tpl.Name, logErr, said)
	}
	return fmt.Sprint(out.String(), err)
}

// pool applies a template and a pool with the same name, for the image demo:1. fields
// are further fields of the template.
func (s *site) pool(t *testing.T, name string, replicas int, fields string) {
	t.Helper()
	s.apply(t, poolOf(name, replicas, fields, s.memory))
}

func poolOf(name string, replicas int, fields, memory string) string {
	return fmt.Sprintf(`
apiVersion: agentrun.dev/v1alpha1
kind: SandboxTemplate
metadata: {name: %[1]s}
spec:
  image: demo:1
  resources: {cpu: 1, memory: %[4]s}
  %[3]s
---
apiVersion: agentrun.dev/v1alpha1
kind: SandboxPool
metadata: {name: %[1]s}
spec: {templateRef: {name: %[1]s}, replicas: %[2]d}
`, name, replicas, fields, memory)
}

// claim claims a sandbox of a pool. fields are further fields of the claim.
func (s *site) claim(t *testing.T, pool, name string, fields ...string) {
	t.Helper()
	s.apply(t, claimOf(pool, name, fields...))
}

func claimOf(pool, name string, fields ...string) string {
	return fmt.Sprintf("apiVersion: agentrun.dev/v1alpha1\nkind: SandboxClaim\nmetadata: {name: %s}\nspec:\n  poolRef: {name: %s}\n  %s\n",
		name, pool, strings.Join(fields, "\n  "))
}

// fork forks a sandbox; the children are NAME-1, NAME-2, ….
func (s *site) fork(t *testing.T, source, name string, n int, narrower *rest.NetworkPolicy) {
	t.Helper()
	f, err := s.client.Fork(t.Context(), source, rest.ForkCreate{Name: name, Replicas: n, NetworkPolicy: narrower}, "")
	if err != nil {
		t.Fatalf("fork %s: %v", source, err)
	}
	for _, o := range f.Children {
		if o.Problem != "" {
			t.Fatalf("fork %s: %s: %s", source, o.Name, o.Problem)
		}
	}
}

// do pauses, resumes or hibernates a sandbox.
func (s *site) do(t *testing.T, name string, verb client.Verb) {
	t.Helper()
	if _, err := s.client.Do(t.Context(), name, verb); err != nil {
		t.Fatalf("%s %s: %v", verb, name, err)
	}
}

// run runs a command in a sandbox.
func (s *site) run(t *testing.T, sandbox string, argv ...string) rest.ExecResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := s.client.Run(ctx, sandbox, rest.ExecRequest{Argv: argv})
	if err != nil {
		t.Fatalf("run %.80q in %s: %v", argv, sandbox, err)
	}
	return r
}

// prints checks that a command in a sandbox succeeds and that its output
// contains want.
func (s *site) prints(t *testing.T, sandbox, want string, argv ...string) {
	t.Helper()
	r := s.run(t, sandbox, argv...)
	if r.ExitCode != 0 || !strings.Contains(r.Stdout, want) {
		seen, err := s.agentrun(t, "network", "log", sandbox)
		t.Errorf("%s: %.60q: exit code %d, %q; want %q\n%s\nits network, %v:\n%s", sandbox, argv, r.ExitCode, r.Stdout, want, r.Stderr, err, seen)
	}
}
