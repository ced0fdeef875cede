package node

import (
	"context"
	"errors"
	"io/fs"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// Use is a sandbox that runs and that somebody uses, until Done.
type Use struct {
	member  *member
	machine engine.Sandbox
	// Sandbox is as it was when the use began.
	Sandbox sandbox.Sandbox
}

// Agent speaks to what is inside. Execs and executions of code that it starts
// go on when the use is over.
func (u *Use) Agent() *guestrpc.Client { return u.machine.Agent() }

// Stats is what the sandbox costs.
func (u *Use) Stats(ctx context.Context) (sandbox.Stats, error) {
	s, err := u.machine.Stats(ctx)
	return fromStats(s), err
}

// Scope is as whom and from where files are reached where nothing else is said.
func (u *Use) Scope() guestrpc.FileScope {
	return guestrpc.FileScope{User: u.Sandbox.User, Workdir: u.Sandbox.Workdir}
}

// Exec completes what a request leaves open: user and working folder. The
// environment is there already.
func (u *Use) Exec(req guestrpc.ExecRequest) guestrpc.ExecRequest {
	if req.User == "" {
		req.User = u.Sandbox.User
	}
	if req.Workdir == "" {
		req.Workdir = u.Sandbox.Workdir
	}
	return req
}

// DefaultContext names the context of a language that code runs in where none is
// named, and sees to it that it is there, with the sandbox's user and folder.
func (u *Use) DefaultContext(ctx context.Context, language string) (string, error) {
	name := "default"
	if language != "" && language != "python" {
		name += "-" + language
	}
	b := u.member
	b.mu.Lock()
	there := b.contexts[name]
	b.mu.Unlock()
	if there {
		return name, nil
	}
	scope := u.Scope()
	_, err := u.Agent().CreateContext(ctx, guestrpc.CodeCreateRequest{ID: name, Language: language, Workdir: scope.Workdir, User: scope.User})
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.contexts == nil {
		b.contexts = map[string]bool{}
	}
	b.contexts[name] = true
	return name, nil
}

// CloseContext ends the kernel of a context and forgets the context.
func (u *Use) CloseContext(ctx context.Context, id string) error {
	b := u.member
	b.mu.Lock()
	delete(b.contexts, id)
	b.mu.Unlock()
	return u.Agent().CloseContext(ctx, id)
}

// Use begins to use a sandbox. One that is paused or hibernated goes on; many
// that ask at once wake it once.
func (m *Manager) Use(ctx context.Context, k sandbox.Key) (*Use, error) {
	if err := m.begin(); err != nil {
		return nil, err
	}
	b, err := m.find(k)
	if err != nil {
		return nil, err
	}
	if u := b.use(); u != nil {
		return u, nil
	}
	var u *Use
	_, err = m.with(ctx, k, func(b *member) error {
		if err := b.resume(ctx); err != nil {
			return err
		}
		u = b.use()
		return nil
	})
	if err != nil {
		return nil, err
	}
	if u == nil {
		return nil, m.whyGone(k)
	}
	return u, nil
}

// use counts a user of a sandbox that runs.
func (b *member) use() *Use {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.record.State != sandbox.Running || b.machine == nil {
		return nil
	}
	b.users++
	if b.users == 1 {
		b.arm()
	}
	return &Use{member: b, machine: b.machine, Sandbox: b.record}
}

// Done ends the use.
func (u *Use) Done() {
	b := u.member
	b.mu.Lock()
	defer b.mu.Unlock()
	b.users--
	if b.users == 0 {
		b.arm()
	}
}
