package template

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

// all runs all steps before the snapshot of a stage, and returns the environment
// that programs have after them.
func (r *run) all(ctx context.Context, req node.BuildRequest, env sandbox.Env) (sandbox.Env, error) {
	if err := r.prepare(ctx, env); err != nil {
		return env, err
	}
	if err := r.init(ctx, req.Spec.Init); err != nil {
		return env, err
	}
	if req.TrustCA != nil {
		var err error
		if env, err = r.trust(ctx, req.TrustCA, env); err != nil {
			return env, err
		}
	}
	if req.Stage == sandbox.AfterReady {
		return env, r.finish(ctx, req.Spec)
	}
	return env, nil
}

// prepare sets the environment and makes the working folder.
func (r *run) prepare(ctx context.Context, env sandbox.Env) error {
	if err := r.agent.SetEnv(ctx, guestrpc.SetEnvRequest{Env: env.Strings()}); err != nil {
		return fmt.Errorf("set the environment: %w", err)
	}
	if err := r.agent.Mkdir(ctx, guestrpc.MkdirRequest{Path: r.workdir, Perm: 0o755, Parents: true}); err != nil {
		return fmt.Errorf("make the working folder %s: %w", r.workdir, err)
	}
	// The interpreters that are started on first use.
	for id, language := range map[string]string{"default": "python", "default-bash": "bash", "default-node": "node"} {
		if _, err := r.agent.CreateContext(ctx, guestrpc.CodeCreateRequest{ID: id, Language: language, Workdir: r.workdir, User: r.user}); err != nil {
			return fmt.Errorf("prepare the %s kernel: %w", language, err)
		}
	}
	if r.user == "" {
		return nil
	}
	code, said, err := r.exec(ctx, guestrpc.ExecRequest{Argv: []string{"chown", r.user, r.workdir}, Workdir: "/"})
	if err == nil && code != 0 {
		err = fmt.Errorf("chown exited with %d: %s", code, bytes.TrimSpace(said))
	}
	if err != nil {
		return fmt.Errorf("give the working folder %s to %s: %w", r.workdir, r.user, err)
	}
	return nil
}

// init runs the init commands.
func (r *run) init(ctx context.Context, commands []string) error {
	for i, c := range commands {
		say(r.log, "init %d of %d: %s", i+1, len(commands), c)
		code, said, err := r.exec(ctx, r.shell(c))
		if err != nil {
			return fmt.Errorf("init command %d (%s): %w", i+1, c, err)
		}
		if code != 0 {
			return fmt.Errorf("init command %d (%s) exited with %d%s", i+1, c, code, explain(said))
		}
	}
	return nil
}

func (r *run) shell(command string) guestrpc.ExecRequest {
	return guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", command}, User: r.user, Workdir: r.workdir}
}

// exec runs a program with its output going to the log, and returns the last
// part of the output.
func (r *run) exec(ctx context.Context, req guestrpc.ExecRequest) (code int, said []byte, err error) {
	var last tail
	out := io.MultiWriter(r.log, &last)
	st, err := r.agent.Run(ctx, req, nil, out, out)
	if err != nil {
		return 0, nil, err
	}
	return int(st.Code), last.bytes, nil
}

// noNetwork matches the messages of programs that have no network.
var noNetwork = regexp.MustCompile(`(?i)temporary failure in name resolution|could not resolve|name or service not known|network is unreachable|no route to host|failed to establish a new connection|EAI_AGAIN|getaddrinfo`)

// explain returns the end of the output as an addition to an error.
func explain(said []byte) string {
	text := ""
	if line := lastLine(said); line != "" {
		text = ": " + line
	}
	if noNetwork.Match(said) {
		text += ". It looks as if the network were missing: a build reaches what the template's buildNetwork allows, or the node's default (agentrun up --network); " +
			"allow what the command fetches, or put it into the image (agentrun image build)"
	}
	return text
}

func lastLine(b []byte) string {
	b = bytes.TrimSpace(b)
	return string(b[bytes.LastIndexByte(b, '\n')+1:])
}

// tail keeps the last part of the data that is written to it.
type tail struct{ bytes []byte }

const tailSize = 8 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.bytes = append(t.bytes, p...)
	if over := len(t.bytes) - tailSize; over > 0 {
		t.bytes = append(t.bytes[:0:0], t.bytes[over:]...)
	}
	return len(p), nil
}

// finish waits until the sandbox is ready and warms it up.
func (r *run) finish(ctx context.Context, spec sandbox.TemplateSpec) error {
	if spec.Ready != nil {
		if err := r.ready(ctx, *spec.Ready); err != nil {
			return err
		}
	}
	if spec.Warmup != nil {
		return r.warm(ctx, *spec.Warmup)
	}
	return nil
}

// ready waits until a check succeeds.
func (r *run) ready(ctx context.Context, check sandbox.ReadyCheck) error {
	limit := check.Timeout
	if limit == 0 {
		limit = sandbox.DefaultReady + check.Delay
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	switch {
	case check.Delay > 0:
		say(r.log, "wait for %v", check.Delay)
		select {
		case <-time.After(check.Delay):
			return nil
		case <-ctx.Done():
			return fmt.Errorf("wait for %v: %w", check.Delay, ctx.Err())
		}
	case check.Port != 0:
		say(r.log, "wait for port %d", check.Port)
		err := repeat(ctx, func() (bool, error) { return r.listens(ctx, check.Port) })
		if err != nil {
			return fmt.Errorf("nothing listens on port %d after %v: %w", check.Port, limit, err)
		}
		return nil
	}
	say(r.log, "wait for %s", check.Command)
	var code int
	var said []byte
	err := repeat(ctx, func() (_ bool, err error) {
		code, said, err = r.exec(ctx, r.shell(check.Command))
		return code == 0, err
	})
	if err != nil {
		return fmt.Errorf("the ready check (%s) did not succeed within %v, it last exited with %d%s: %w", check.Command, limit, code, explain(said), err)
	}
	return nil
}

// repeat calls try until it succeeds, with pauses that double.
func repeat(ctx context.Context, try func() (good bool, err error)) error {
	const first, last = 20 * time.Millisecond, time.Second
	for pause := first; ; pause = min(2*pause, last) {
		good, err := try()
		if good || err != nil {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// listens reports whether a program listens on a TCP port.
func (r *run) listens(ctx context.Context, port uint16) (bool, error) {
	const limit = 4 << 20
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		b, err := r.agent.ReadFile(ctx, guestrpc.ReadRequest{Path: table}, limit)
		if err != nil && table == "/proc/net/tcp" {
			return false, err
		}
		if listening(string(b), port) {
			return true, nil
		}
	}
	return false, nil
}

// listening looks for a port in a table of proc_net_tcp(5): the local address
// is the second field, the state the fourth.
func listening(table string, port uint16) bool {
	suffix := fmt.Sprintf(":%04X", port)
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) > 3 && strings.HasSuffix(f[1], suffix) && f[3] == stateListen {
			return true
		}
	}
	return false
}

const stateListen = "0A"

// warm runs code in the interpreter that forks inherit.
func (r *run) warm(ctx context.Context, code sandbox.Program) error {
	say(r.log, "warm up (%s)", code.Language)
	var last tail
	out := io.MultiWriter(r.log, &last)
	var problem string
	st, err := r.agent.RunCode(ctx, guestrpc.CodeRunRequest{Language: code.Language, Source: code.Text}, out, out,
		func(e guestrpc.CodeEvent) error {
			if e.Kind == guestrpc.CodeEventError {
				if raised, err := e.Error(); err == nil {
					problem = ": " + raised.Name + ": " + raised.Value
					_, _ = io.WriteString(r.log, raised.Traceback) // only people read the log
				}
			}
			return nil
		})
	switch {
	case err != nil:
		return fmt.Errorf("the warm-up code: %w", err)
	case st.State == guestrpc.CodeDied:
		return fmt.Errorf("the warm-up code ended its kernel: %s", st.Reason)
	case st.State != guestrpc.CodeOK:
		return fmt.Errorf("the warm-up code exited with %d%s%s", st.Code, problem, explain(last.bytes))
	}
	return nil
}
