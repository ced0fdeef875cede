package server

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/sandbox"
)

// What enumerations are in package sandbox. What is not there is unspecified.
var (
	nodePhases = map[sandbox.Phase]nodev1.Phase{
		sandbox.PhasePending: nodev1.Phase_PHASE_PENDING, sandbox.PhaseBuilding: nodev1.Phase_PHASE_BUILDING,
		sandbox.PhaseReady: nodev1.Phase_PHASE_READY, sandbox.PhaseFailed: nodev1.Phase_PHASE_FAILED,
	}
	nodeStages = map[sandbox.Stage]nodev1.Stage{sandbox.AfterInit: nodev1.Stage_STAGE_INIT, sandbox.AfterReady: nodev1.Stage_STAGE_READY}
	nodeStates = map[sandbox.State]nodev1.SandboxState{
		sandbox.Running: nodev1.SandboxState_SANDBOX_STATE_RUNNING, sandbox.Paused: nodev1.SandboxState_SANDBOX_STATE_PAUSED,
		sandbox.Hibernating: nodev1.SandboxState_SANDBOX_STATE_HIBERNATING, sandbox.Hibernated: nodev1.SandboxState_SANDBOX_STATE_HIBERNATED,
		sandbox.Resuming: nodev1.SandboxState_SANDBOX_STATE_RESUMING, sandbox.Ended: nodev1.SandboxState_SANDBOX_STATE_ENDED,
	}
	nodeReasons = map[sandbox.Reason]nodev1.EndReason{
		sandbox.ReasonKilled: nodev1.EndReason_END_REASON_KILLED, sandbox.ReasonTimeout: nodev1.EndReason_END_REASON_TIMEOUT,
		sandbox.ReasonIdle: nodev1.EndReason_END_REASON_IDLE_TIMEOUT, sandbox.ReasonExited: nodev1.EndReason_END_REASON_EXITED,
		sandbox.ReasonCrashed: nodev1.EndReason_END_REASON_CRASHED, sandbox.ReasonOutOfMemory: nodev1.EndReason_END_REASON_OUT_OF_MEMORY,
		sandbox.ReasonHostRestart: nodev1.EndReason_END_REASON_HOST_RESTART, sandbox.ReasonLost: nodev1.EndReason_END_REASON_LOST,
	}
	nodeActions = map[sandbox.TimeoutAction]nodev1.TimeoutAction{
		sandbox.TimeoutKill: nodev1.TimeoutAction_TIMEOUT_ACTION_KILL, sandbox.TimeoutPause: nodev1.TimeoutAction_TIMEOUT_ACTION_PAUSE,
		sandbox.TimeoutHibernate: nodev1.TimeoutAction_TIMEOUT_ACTION_HIBERNATE,
	}
)

// fromNode is the inverse of one of the maps above.
func fromNode[S ~string, N comparable](all map[S]N, given N) S {
	for s, n := range all {
		if n == given {
			return s
		}
	}
	return ""
}

// nodeTime leaves out a time that is not known.
func nodeTime(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// nodeDuration leaves out what is none.
func nodeDuration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// duration reads a duration of a field; one that is missing is 0.
func duration(field string, d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	got := d.AsDuration()
	// AsDuration gives the closest that a time.Duration can be.
	if d.CheckValid() != nil || got < 0 || durationpb.New(got).Seconds != d.Seconds {
		return 0, invalid(field, "it is negative, or longer than can be")
	}
	return got, nil
}

func nodeLifetime(l sandbox.Lifetime) *nodev1.Lifetime {
	return &nodev1.Lifetime{Timeout: nodeDuration(l.Timeout), IdleTimeout: nodeDuration(l.IdleTimeout), OnTimeout: nodeActions[l.OnTimeout]}
}

func lifetimeOf(g *nodev1.Lifetime) (l sandbox.Lifetime, err error) {
	l.OnTimeout = fromNode(nodeActions, g.GetOnTimeout())
	if l.Timeout, err = duration("lifetime.timeout", g.GetTimeout()); err != nil {
		return l, err
	}
	l.IdleTimeout, err = duration("lifetime.idle_timeout", g.GetIdleTimeout())
	return l, err
}

// templateSpecOf reads a template's spec, and completes it.
func templateSpecOf(g *nodev1.TemplateSpec) (s sandbox.TemplateSpec, err error) {
	s = sandbox.TemplateSpec{
		Image: g.GetImage(), Init: g.GetInit(), Env: sandbox.Env(g.GetEnv()), Workdir: g.GetWorkdir(), User: g.GetUser(),
		MilliCPUs: sandbox.DefaultMilliCPUs, Memory: sandbox.DefaultMemory, Disk: g.GetDiskBytes(),
	}
	if n := g.GetMilliCpus(); n > 0 {
		s.MilliCPUs = n
	}
	if n := g.GetMemoryBytes(); n > 0 {
		s.Memory = n
	}
	if w := g.GetWarmup(); w != nil {
		s.Warmup = &sandbox.Program{Language: w.GetLanguage(), Text: w.GetText()}
	}
	r := g.GetReady()
	if r == nil {
		return s, nil
	}
	if r.GetPort() > 65535 {
		return s, invalid("spec.ready.port", "%d is not a port", r.GetPort())
	}
	s.Ready = &sandbox.ReadyCheck{Command: r.GetCommand(), Port: uint16(r.GetPort())}
	if s.Ready.Delay, err = duration("spec.ready.delay", r.GetDelay()); err != nil {
		return s, err
	}
	s.Ready.Timeout, err = duration("spec.ready.timeout", r.GetTimeout())
	return s, err
}

func nodeSpec(s sandbox.TemplateSpec) *nodev1.TemplateSpec {
	out := &nodev1.TemplateSpec{
		Image: s.Image, Init: s.Init, Env: s.Env, Workdir: s.Workdir, User: s.User, MilliCpus: s.MilliCPUs, MemoryBytes: s.Memory,
		DiskBytes: s.Disk,
	}
	if w := s.Warmup; w != nil {
		out.Warmup = &nodev1.Program{Language: w.Language, Text: w.Text}
	}
	if r := s.Ready; r != nil {
		out.Ready = &nodev1.ReadyCheck{Timeout: nodeDuration(r.Timeout)}
		switch {
		case r.Command != "":
			out.Ready.Check = &nodev1.ReadyCheck_Command{Command: r.Command}
		case r.Port != 0:
			out.Ready.Check = &nodev1.ReadyCheck_Port{Port: uint32(r.Port)}
		default:
			out.Ready.Check = &nodev1.ReadyCheck_Delay{Delay: durationpb.New(r.Delay)}
		}
	}
	return out
}

// nodeTemplate adds to a template how far it is.
func (n *nodeAPI) nodeTemplate(t sandbox.Template) (*nodev1.Template, error) {
	builds, err := n.Service.Builds(t)
	if err != nil {
		return nil, err
	}
	out := &nodev1.Template{
		Namespace: string(t.Namespace), Name: string(t.Name), Spec: nodeSpec(t.Spec), Revision: t.Revision,
		Created: nodeTime(t.Created), Phase: nodev1.Phase_PHASE_PENDING,
	}
	for _, b := range builds {
		out.Builds = append(out.Builds, &nodev1.Build{
			Stage: nodeStages[b.Stage], Phase: nodePhases[b.Phase], Problem: b.Problem, Image: b.Image,
			Started: nodeTime(b.Started), Finished: nodeTime(b.Finished),
		})
		if b.Stage == sandbox.AfterReady {
			out.Phase, out.Problem = nodePhases[b.Phase], b.Problem
		}
	}
	return out, nil
}

func (n *nodeAPI) nodePool(k sandbox.Key) (*nodev1.Pool, error) {
	p, st, err := n.Service.Pool(k)
	if err != nil {
		return nil, err
	}
	return &nodev1.Pool{
		Namespace: string(p.Namespace), Name: string(p.Name), Created: nodeTime(p.Created),
		Spec: &nodev1.PoolSpec{
			Template: string(p.Spec.Template), Replicas: uint32(p.Spec.Replicas), SnapshotAfter: nodeStages[p.Spec.Stage],
		},
		Phase: nodePhases[st.Phase], Problem: st.Problem, Ready: uint32(st.Ready), Snapshots: uint32(st.Snapshots),
	}, nil
}

// nodeSandbox leaves the environment out, as showSandbox does.
func nodeSandbox(s sandbox.Sandbox) *nodev1.Sandbox {
	return &nodev1.Sandbox{
		Namespace: string(s.Namespace), Name: string(s.Name), Id: string(s.ID), State: nodeStates[s.State],
		Pool: string(s.Pool), Template: string(s.Template), Revision: s.Revision, Engine: s.Engine,
		Metadata: s.Metadata, Workdir: s.Workdir, User: s.User, MemoryBytes: s.Memory,
		Parent: string(s.Parent), Fork: string(s.Fork), Checkpoint: string(s.Checkpoint),
		Created: nodeTime(s.Created), Ended: nodeTime(s.Ended), Reason: nodeReasons[s.Reason], Detail: s.Detail,
		Lifetime: nodeLifetime(s.Lifetime),
	}
}

func nodeFork(f sandbox.Fork) *nodev1.Fork {
	out := &nodev1.Fork{
		Namespace: string(f.Namespace), Name: string(f.Name), Source: string(f.Source), SourceId: string(f.SourceID),
		Replicas: uint32(f.Replicas), Created: nodeTime(f.Created), Phase: nodePhases[f.Phase], Pause: nodeDuration(f.Pause),
	}
	for _, c := range f.Children {
		out.Children = append(out.Children, &nodev1.ForkOutcome{Name: string(c.Name), Id: string(c.ID), Problem: c.Problem})
	}
	return out
}

func nodeCheckpoint(c sandbox.CheckpointSize) *nodev1.Checkpoint {
	return &nodev1.Checkpoint{
		Namespace: string(c.Namespace), Name: string(c.Name), Id: string(c.ID), Source: string(c.Of.Name), SourceId: string(c.Of.ID),
		Pool: string(c.Of.Pool), Template: string(c.Of.Template), Revision: c.Of.Revision, Engine: c.Of.Engine,
		Workdir: c.Of.Workdir, User: c.Of.User, MemoryBytes: c.Of.Memory, Created: nodeTime(c.Created),
		StoredBytes: c.Stored, UnsharedBytes: c.Unshared,
	}
}

func nodeStats(c sandbox.Cost) *nodev1.SandboxStats {
	return &nodev1.SandboxStats{
		Namespace: string(c.Namespace), Name: string(c.Name), Id: string(c.ID), State: nodeStates[c.State], Time: nodeTime(c.At),
		ReservedBytes: c.Reserved, OwnBytes: c.Own, SharedBytes: c.Proportional - min(c.Own, c.Proportional), DiskBytes: c.Stats.Disk,
		Cpu: durationpb.New(c.CPU), Generation: c.Generation,
	}
}
