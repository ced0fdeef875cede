package node

import (
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/snapshot"
)

// The journal and the APIs describe sandboxes with types of package sandbox,
// engines and snapshots with types of their own. These functions are the only
// places that convert them.

func engineLimits(l sandbox.Limits) engine.Limits {
	return engine.Limits{MilliCPUs: l.MilliCPUs, IO: engine.IOLimits(l.IO)}
}

func fromHeld(list []engine.Held) []sandbox.Held {
	if list == nil {
		return nil
	}
	out := make([]sandbox.Held, len(list))
	for i, h := range list {
		out[i] = sandbox.Held(h)
	}
	return out
}

// heldBy lists the parts of a snapshot that a fork of it holds.
func heldBy(snap *snapshot.Snapshot, owner string) ([]sandbox.Held, error) {
	list, err := engine.HeldBy(snap, owner)
	return fromHeld(list), err
}

func fromStats(s engine.Stats) sandbox.Stats {
	return sandbox.Stats{Own: s.Own, Proportional: s.Proportional, Disk: s.Disk, CPU: s.CPU, Generation: s.Generation}
}

func fromLiveFork(s engine.LiveForkStats) sandbox.LiveForkStats {
	return sandbox.LiveForkStats{Pause: s.Pause, LongestWait: s.LongestWait}
}

func fromSize(s snapshot.Size) sandbox.Size { return sandbox.Size(s) }
