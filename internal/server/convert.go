package server

import (
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/sandbox"
)

// templateSpec reads a template's spec, and completes it.
func templateSpec(g rest.TemplateSpec) (sandbox.TemplateSpec, error) {
	s := sandbox.TemplateSpec{
		Image: g.Image, Init: g.Init, Env: sandbox.Env(g.Env), Workdir: g.Workdir, User: g.User,
		MilliCPUs: sandbox.DefaultMilliCPUs, Memory: sandbox.DefaultMemory,
	}
	for _, size := range []struct {
		field string
		given int64
		into  *uint64
	}{{"milliCPUs", g.MilliCPUs, &s.MilliCPUs}, {"memory", g.Memory, &s.Memory}, {"disk", g.Disk, &s.Disk}} {
		if size.given < 0 {
			return s, invalid(size.field, "%d is negative", size.given)
		}
		if size.given > 0 {
			*size.into = uint64(size.given)
		}
	}
	if g.Warmup != nil {
		s.Warmup = &sandbox.Program{Language: g.Warmup.Language, Text: g.Warmup.Text}
	}
	if g.Ready == nil {
		return s, nil
	}
	if g.Ready.Port < 0 || g.Ready.Port > 65535 {
		return s, invalid("ready.port", "%d is not a port", g.Ready.Port)
	}
	s.Ready = &sandbox.ReadyCheck{Command: g.Ready.Command, Port: uint16(g.Ready.Port)}
	var err error
	if s.Ready.Delay, err = parseDuration("ready.delay", g.Ready.Delay); err != nil {
		return s, err
	}
	s.Ready.Timeout, err = parseDuration("ready.timeout", g.Ready.Timeout)
	return s, err
}

func claimSpec(g rest.SandboxCreate) (s sandbox.ClaimSpec, err error) {
	if g.Pool == "" {
		return s, invalid("pool", "a sandbox needs one")
	}
	if s.Pool, err = sandbox.ParseName(g.Pool); err != nil {
		return s, err
	}
	s.Env, s.Metadata = sandbox.Env(g.Env), g.Metadata
	if s.Secrets, err = secretRefs(g.Secrets); err != nil {
		return s, err
	}
	s.Lifetime, err = lifetime(g.Timeout, g.IdleTimeout, g.OnTimeout)
	return s, err
}

func lifetime(timeout, idle string, action rest.OnTimeout) (l sandbox.Lifetime, err error) {
	l.OnTimeout = sandbox.TimeoutAction(action)
	if l.Timeout, err = parseDuration("timeout", timeout); err != nil {
		return l, err
	}
	l.IdleTimeout, err = parseDuration("idleTimeout", idle)
	return l, err
}

func showDuration(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}

// showTime leaves out a time that is not known.
func showTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// showTemplate adds to a template how far it is.
func (a *api) showTemplate(t sandbox.Template) (rest.Template, error) {
	builds, err := a.Service.Builds(t)
	if err != nil {
		return rest.Template{}, err
	}
	s := t.Spec
	out := rest.Template{
		Namespace: string(t.Namespace), Name: string(t.Name), Revision: t.Revision, Created: t.Created,
		Phase: rest.PhasePending, Builds: []rest.Build{},
		Spec: rest.TemplateSpec{
			Image: s.Image, Init: s.Init, Env: rest.Env(s.Env), Workdir: s.Workdir, User: s.User,
			MilliCPUs: int64(s.MilliCPUs), Memory: int64(s.Memory), Disk: int64(s.Disk),
		},
	}
	if s.Warmup != nil {
		out.Spec.Warmup = &rest.Program{Language: s.Warmup.Language, Text: s.Warmup.Text}
	}
	if c := s.Ready; c != nil {
		out.Spec.Ready = &rest.ReadyCheck{Command: c.Command, Port: int(c.Port), Delay: showDuration(c.Delay), Timeout: showDuration(c.Timeout)}
	}
	for _, b := range builds {
		out.Builds = append(out.Builds, rest.Build{
			Stage: rest.Stage(b.Stage), Phase: rest.Phase(b.Phase), Problem: b.Problem, Image: b.Image,
			Started: b.Started, Finished: showTime(b.Finished),
		})
		if b.Stage == sandbox.AfterReady {
			out.Phase, out.Problem = rest.Phase(b.Phase), b.Problem
		}
	}
	return out, nil
}

func (a *api) showPool(k sandbox.Key) (rest.Pool, error) {
	p, status, err := a.Service.Pool(k)
	return rest.Pool{
		Namespace: string(p.Namespace), Name: string(p.Name), Created: p.Created,
		Spec:  rest.PoolSpec{Template: string(p.Spec.Template), Replicas: p.Spec.Replicas, SnapshotAfter: rest.Stage(p.Spec.Stage)},
		Phase: rest.Phase(status.Phase), Ready: status.Ready, Snapshots: status.Snapshots, Problem: status.Problem,
	}, err
}

// showSandbox leaves the environment out: it may hold what is not for everybody
// who lists sandboxes.
func showSandbox(s sandbox.Sandbox) rest.Sandbox {
	return rest.Sandbox{
		Namespace: string(s.Namespace), Name: string(s.Name), Id: string(s.ID), State: rest.SandboxState(s.State),
		Pool: string(s.Pool), Template: string(s.Template), Revision: s.Revision, Engine: s.Engine,
		Metadata: s.Metadata, Workdir: s.Workdir, User: s.User, Memory: int64(s.Memory),
		Secrets: showSecretRefs(s.Secrets), SecretsBy: string(s.SecretsBy),
		Parent: string(s.Parent), Fork: string(s.Fork), Checkpoint: string(s.Checkpoint), Created: s.Created, Ended: showTime(s.Ended),
		Reason: rest.SandboxReason(s.Reason), Detail: s.Detail,
		Timeout: showDuration(s.Timeout), IdleTimeout: showDuration(s.IdleTimeout), OnTimeout: rest.OnTimeout(s.OnTimeout),
	}
}

func showFork(f sandbox.Fork) rest.Fork {
	out := rest.Fork{
		Namespace: string(f.Namespace), Name: string(f.Name), Source: string(f.Source), SourceID: string(f.SourceID),
		Replicas: f.Replicas, Created: f.Created, Phase: rest.Phase(f.Phase), Pause: showDuration(f.Pause),
		By: string(f.By), HoldsSecrets: f.HoldsSecrets,
		Children: make([]rest.ForkOutcome, 0, len(f.Children)),
	}
	for _, c := range f.Children {
		out.Children = append(out.Children, rest.ForkOutcome{Name: string(c.Name), Id: string(c.ID), Problem: c.Problem})
	}
	return out
}
