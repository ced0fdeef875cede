// Package tenants plays the tenants of a daemon through its REST API: a quiet one,
// one that is merely busy, and one that asks for as much as it can get.
package tenants

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
)

// Tenant is a tenant with a namespace of its own, which contains a pool.
type Tenant struct {
	// Client is a client of the namespace, with the tenant's key.
	Client *client.Client
	Pool   string
	// Template is the template that a hostile tenant builds again and again.
	Template rest.TemplateSpec
	// Argv is the program of execs.
	Argv []string
}

// Times are a tenant's waiting times.
type Times struct{ Claims, Execs []time.Duration }

// Quiet claims a sandbox, runs Argv in it twice and ends it, count times, one after
// the other. Every failure is an error.
func Quiet(ctx context.Context, t Tenant, count int) (Times, error) {
	var out Times
	for i := range count {
		if err := t.once(ctx, fmt.Sprintf("quiet-%d", i), &out); err != nil {
			return out, fmt.Errorf("the quiet tenant's round %d: %w", i, err)
		}
	}
	return out, nil
}

// once claims a sandbox, uses it and ends it.
func (t Tenant) once(ctx context.Context, name string, times *Times) error {
	begin := time.Now()
	if _, err := t.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: t.Pool}, ""); err != nil {
		return fmt.Errorf("claim: %w", err)
	}
	times.Claims = append(times.Claims, time.Since(begin))
	for range 2 {
		begin := time.Now()
		r, err := t.Client.Run(ctx, name, rest.ExecRequest{Argv: t.Argv})
		if err != nil {
			return fmt.Errorf("exec: %w", err)
		}
		if r.ExitCode != 0 {
			return fmt.Errorf("exec: it ended as %+v", r)
		}
		times.Execs = append(times.Execs, time.Since(begin))
	}
	if _, err := t.Client.Kill(ctx, name); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	return nil
}

// Busy lets workers claim, use and end sandboxes until ctx ends. It asks for nothing
// beyond its capacity.
func Busy(ctx context.Context, t Tenant, workers int) error {
	var all sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		all.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if err := t.once(ctx, fmt.Sprintf("busy-%d-%d", w, i), &Times{}); err != nil && ctx.Err() == nil {
					errs[w] = fmt.Errorf("the busy tenant: %w", err)
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// Answers counts the answers that a hostile tenant has got, by request and error
// code; an empty code is success. The zero value is empty.
type Answers struct {
	mu  sync.Mutex // protects all following fields
	all map[string]map[rest.ErrorCode]int
}

// Of is how often a request was answered with a code.
func (a *Answers) Of(what string, code rest.ErrorCode) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.all[what][code]
}

// Unexpected lists the answers with codes that are no refusals, in words.
func (a *Answers) Unexpected() (out []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for what, codes := range a.all {
		for code, n := range codes {
			if !slices.Contains(refusals, code) {
				out = append(out, fmt.Sprintf("%s: %s (%d times)", what, code, n))
			}
		}
	}
	return out
}

// refusals are the codes with which a daemon may answer a hostile tenant.
var refusals = []rest.ErrorCode{
	"", rest.ErrorCodeInsufficientCapacity, rest.ErrorCodeNotFound, rest.ErrorCodeConflict, rest.ErrorCodeAlreadyExists, rest.ErrorCodeEnded, rest.ErrorCodeNotReady,
}

func (a *Answers) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var b strings.Builder
	for _, what := range slices.Sorted(maps.Keys(a.all)) {
		fmt.Fprintf(&b, "%s:", what)
		for _, code := range slices.Sorted(maps.Keys(a.all[what])) {
			name := string(code)
			if name == "" {
				name = "ok"
			}
			fmt.Fprintf(&b, " %s %d", name, a.all[what][code])
		}
		b.WriteString("\n")
	}
	return b.String()
}

// note counts an answer, and reports whether it was a success.
func (a *Answers) note(ctx context.Context, what string, err error) bool {
	if ctx.Err() != nil {
		return false // the call was cut off
	}
	code := rest.ErrorCode("")
	if err != nil {
		code = "failed"
		var told *client.Error
		if errors.As(err, &told) {
			code = told.Code
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.all == nil {
		a.all = map[string]map[rest.ErrorCode]int{}
	}
	if a.all[what] == nil {
		a.all[what] = map[rest.ErrorCode]int{}
	}
	a.all[what][code]++
	return err == nil
}

// Hostile floods a daemon until ctx ends, in several ways at once, with workers
// goroutines each. It keeps everything that it has got, unless giving it up brings
// more.
func Hostile(ctx context.Context, t Tenant, workers int, answers *Answers) {
	h := &hostile{Tenant: t, answers: answers}
	var all sync.WaitGroup
	for _, flood := range []func(context.Context, int, int){h.lookup, h.build, h.fork, h.ticket, h.log, h.hibernate} {
		for w := range workers {
			all.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					flood(ctx, w, i)
				}
			})
		}
	}
	all.Wait()
}

type hostile struct {
	Tenant
	answers *Answers
}

// own makes sure that a worker's sandbox exists, and claims it if necessary.
func (h *hostile) own(ctx context.Context, name string) bool {
	_, err := h.Client.Sandbox(ctx, name)
	if err == nil {
		return true
	}
	_, err = h.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: h.Pool}, "")
	return h.answers.note(ctx, "claim", err)
}

// lookup asks for missing sandboxes.
func (h *hostile) lookup(ctx context.Context, w, i int) {
	_, err := h.Client.Sandbox(ctx, fmt.Sprintf("none-%d-%d", w, i))
	h.answers.note(ctx, "look-up", err)
}

// build makes templates that are all different. When it is refused another one, it
// deletes one.
func (h *hostile) build(ctx context.Context, w, i int) {
	spec := h.Template
	spec.Env = rest.Env{"REVISION": fmt.Sprint(w, i)}
	_, err := h.Client.PutTemplate(ctx, fmt.Sprintf("t-%d-%d", w, i), spec)
	if !h.answers.note(ctx, "build", err) {
		h.answers.note(ctx, "delete a template", h.Client.DeleteTemplate(ctx, fmt.Sprintf("t-%d-%d", w, i/2)))
	}
}

// fork makes many forks of a sandbox, and ends them.
func (h *hostile) fork(ctx context.Context, w, i int) {
	source := fmt.Sprint("source-", w)
	if !h.own(ctx, source) {
		return
	}
	name := fmt.Sprintf("f-%d-%d", w, i)
	_, err := h.Client.Fork(ctx, source, rest.ForkCreate{Name: name, Replicas: 8}, "")
	if h.answers.note(ctx, "fork", err) {
		h.answers.note(ctx, "delete a fork", h.Client.DeleteFork(ctx, name))
	}
}

// ticket asks for tokens of terminals that it never uses.
func (h *hostile) ticket(ctx context.Context, w, _ int) {
	name := fmt.Sprint("source-", w)
	_, err := h.Client.Terminal(ctx, name, rest.TerminalRequest{Argv: []string{"sh"}, Env: rest.Env{"X": strings.Repeat("x", 64<<10)}})
	h.answers.note(ctx, "ticket", err)
}

// log reads logs and lists.
func (h *hostile) log(ctx context.Context, w, i int) {
	h.answers.note(ctx, "log", h.Client.TemplateLog(ctx, fmt.Sprintf("t-%d-%d", w, i/64), rest.GetTemplateLogParams{Follow: new(bool)}, io.Discard))
	if i%16 == 0 {
		_, err := h.Client.Templates(ctx)
		h.answers.note(ctx, "list", err)
	}
}

// hibernate writes sandboxes to disk and wakes them. It keeps checkpoints until it is
// refused.
func (h *hostile) hibernate(ctx context.Context, w, i int) {
	name := fmt.Sprint("sleeper-", w)
	if !h.own(ctx, name) {
		return
	}
	_, err := h.Client.Checkpoint(ctx, name, rest.CheckpointCreate{Name: fmt.Sprintf("c-%d-%d", w, i)}, "")
	h.answers.note(ctx, "checkpoint", err)
	_, err = h.Client.Do(ctx, name, client.Hibernate)
	h.answers.note(ctx, "hibernate", err)
	_, err = h.Client.Do(ctx, name, client.Resume)
	h.answers.note(ctx, "resume", err)
}

// Leave ends and deletes all objects of a tenant, except for its pool and the pool's
// template.
func Leave(ctx context.Context, t Tenant) error {
	pool, err := t.Client.Pool(ctx, t.Pool)
	if err != nil {
		return err
	}
	// Calls that were cut off may still succeed, so this repeats until the list is
	// empty.
	live, err := t.Client.Sandboxes(ctx, false)
	for err == nil && len(live) > 0 {
		for _, s := range live {
			if _, killErr := t.Client.Kill(ctx, s.Name); killErr != nil && !gone(killErr) {
				err = errors.Join(err, killErr)
			}
		}
		if err == nil {
			live, err = t.Client.Sandboxes(ctx, false)
		}
	}
	if err != nil {
		return err
	}
	saved, err := t.Client.Checkpoints(ctx)
	for _, c := range saved {
		err = errors.Join(err, ignoreGone(t.Client.DeleteCheckpoint(ctx, c.Name)))
	}
	templates, listErr := t.Client.Templates(ctx)
	for _, one := range templates {
		if one.Name != pool.Spec.Template {
			listErr = errors.Join(listErr, ignoreGone(t.Client.DeleteTemplate(ctx, one.Name)))
		}
	}
	return errors.Join(err, listErr)
}

func gone(err error) bool {
	return client.HasCode(err, rest.ErrorCodeNotFound) || client.HasCode(err, rest.ErrorCodeEnded)
}

func ignoreGone(err error) error {
	if gone(err) {
		return nil
	}
	return err
}
