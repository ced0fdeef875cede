package node

import (
	"time"

	"agentrun.dev/internal/sandbox"
)

// objects are those of a journal, by their keys.
type objects struct {
	Templates   map[string]sandbox.Template   `json:"templates"`
	Builds      map[string]sandbox.Build      `json:"builds"`
	Pools       map[string]sandbox.Pool       `json:"pools"`
	Sandboxes   map[string]sandbox.Sandbox    `json:"sandboxes"`
	Forks       map[string]sandbox.Fork       `json:"forks"`
	Checkpoints map[string]sandbox.Checkpoint `json:"checkpoints"`
	Quotas      map[string]sandbox.Quota      `json:"quotas"`
	Answers     map[string]keptAnswer         `json:"outcomes"`
}

// recorded has the objects from which testdata/journal was written: each field of
// each type has a value somewhere.
func recorded() objects {
	at := func(minute int) time.Time { return time.Date(2026, 11, 16, 20, minute, 0, 123456789, time.UTC) }
	named := func(name sandbox.Name) sandbox.Key { return sandbox.Key{Namespace: "team", Name: name} }
	template := sandbox.Template{
		Key: named("python"),
		Spec: sandbox.TemplateSpec{
			Image: "python:3.13", Init: []string{"pip install numpy", "true"}, Env: sandbox.Env{"A": "1", "B": ""}, Workdir: "/work", User: "app",
			MilliCPUs: 1500, Memory: 256 << 20, Disk: 64 << 20,
			Ready:  &sandbox.ReadyCheck{Command: "test -e /ready", Port: 8080, Delay: 3 * time.Second, Timeout: 4 * time.Second},
			Warmup: &sandbox.Program{Language: "python", Text: "import numpy"},
		},
		Revision: "0123456789abcdef", Created: at(1),
	}
	build := sandbox.Build{
		Template: named("python"), Revision: "0123456789abcdef", Stage: sandbox.AfterReady, Phase: sandbox.PhaseReady, Problem: "none",
		Started: at(2), Finished: at(3), Snapshot: "snapshotaaaaaaaaaaaa",
		Built: sandbox.Built{Image: "sha256:abc", Env: sandbox.Env{"PATH": "/bin"}, Workdir: "/work", User: "app"},
	}
	running := sandbox.Sandbox{
		Key: named("running"), ID: "runningaaaaaaaaaaaaa", State: sandbox.Running,
		Pool: "pool", Template: "python", Revision: "0123456789abcdef", Engine: "fake",
		Env: sandbox.Env{"WHO": "a"}, Metadata: map[string]string{"owner": "somebody"}, Workdir: "/work", User: "app",
		Limits:  sandbox.Limits{MilliCPUs: 1500, IO: sandbox.IOLimits{BytesPerSecond: 1 << 20, OpsPerSecond: 500}},
		Memory:  256 << 20,
		Layers:  []sandbox.Held{{ID: "sha256:layer", Bytes: 5 << 20}, {ID: "sha256:sealed@machine", Bytes: 6 << 20}},
		Live:    []sandbox.Held{{ID: "live-1", Bytes: 7 << 20}},
		Secrets: []sandbox.SecretRef{{Secret: "token", Key: "github", Env: "GITHUB_TOKEN"}, {Secret: "token", Key: "NPM"}}, SecretsBy: "key:alice",
		Parent: "parentaaaaaaaaaaaaaa", Fork: "f", Checkpoint: "before",
		Created:  at(4),
		Lifetime: sandbox.Lifetime{Timeout: time.Hour, IdleTimeout: time.Minute, OnTimeout: sandbox.TimeoutHibernate},
		Clock:    sandbox.Clock{Ran: 90 * time.Second, Since: at(5)},
		Machine:  "machineaaaaaaaaaaaaa", Boot: "boot-1",
	}
	become := func(name sandbox.Name, state sandbox.State) sandbox.Sandbox {
		s := running
		s.Name, s.ID, s.State = name, sandbox.ID((string(name) + "aaaaaaaaaaaaaaaaaaaa")[:20]), state
		return s
	}
	paused, hibernating, starting := become("paused", sandbox.Paused), become("hibernating", sandbox.Hibernating), become("starting", sandbox.Starting)
	hibernating.Asleep = "imagehaaaaaaaaaaaaaa"
	hibernated, resuming, ended := become("hibernated", sandbox.Hibernated), become("resuming", sandbox.Resuming), become("ended", sandbox.Ended)
	for _, s := range []*sandbox.Sandbox{&hibernated, &resuming} {
		s.Asleep, s.Kept, s.Machine, s.Boot, s.Layers, s.Live, s.Clock.Since = "imageaaaaaaaaaaaaaaa", 11<<20, "", "", nil, nil, time.Time{}
	}
	ended.Ended, ended.Reason, ended.Detail = at(6), sandbox.ReasonOutOfMemory, "its limit was reached"
	ended.Machine, ended.Boot, ended.Layers, ended.Live, ended.Clock.Since = "", "", nil, nil, time.Time{}
	fork := sandbox.Fork{
		Key: named("f"), Source: "running", SourceID: running.ID, Replicas: 2, Created: at(7), Phase: sandbox.PhaseFailed,
		Children: []sandbox.ForkOutcome{{Name: "f-1", ID: "childaaaaaaaaaaaaaaa"}, {Name: "f-2", Problem: "there is no room"}},
		Pause:    1234567, By: "key:alice", HoldsSecrets: true,
	}
	checkpoint := sandbox.Checkpoint{
		Key: named("before"), ID: "checkpointaaaaaaaaaa", Phase: sandbox.PhaseReady, Created: at(8), Of: ended, Kept: 11 << 20,
	}
	unfinished := sandbox.Checkpoint{Key: named("unfinished"), ID: "unfinishedaaaaaaaaaa", Phase: sandbox.PhasePending, Created: at(9), Of: paused}
	size := sandbox.CheckpointSize{Checkpoint: checkpoint, Size: sandbox.Size{Stored: 12 << 20, Unshared: 13 << 20}}
	o := objects{
		Templates:   map[string]sandbox.Template{"team/python": template},
		Builds:      map[string]sandbox.Build{keyOf(build).String(): build},
		Pools:       map[string]sandbox.Pool{"team/pool": {Key: named("pool"), Spec: sandbox.PoolSpec{Template: "python", Replicas: 3, Stage: sandbox.AfterReady}, Created: at(10)}},
		Sandboxes:   map[string]sandbox.Sandbox{},
		Forks:       map[string]sandbox.Fork{"team/f": fork},
		Checkpoints: map[string]sandbox.Checkpoint{"team/before": checkpoint, "team/unfinished": unfinished},
		Quotas:      map[string]sandbox.Quota{"team": {Namespace: "team", Memory: 1 << 33, Sandboxes: 40, Storage: 1 << 34}},
		Answers: map[string]keptAnswer{
			"claim":      {Body: "digest-1", Time: at(11), Sandbox: &running},
			"fork":       {Body: "digest-2", Time: at(12), Fork: &fork},
			"checkpoint": {Body: "digest-3", Time: at(13), Checkpoint: &size},
		},
	}
	for _, s := range []sandbox.Sandbox{running, paused, hibernating, starting, hibernated, resuming, ended} {
		o.Sandboxes[string(s.ID)] = s
	}
	return o
}
