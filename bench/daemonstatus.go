package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// DaemonStatus is the node's status that is asked for again and again: with one sandbox and
// its template, and with all of them and so many templates and checkpoints more.
type DaemonStatus struct {
	Templates   int        `json:"templates"`
	Checkpoints int        `json:"checkpoints"`
	Process     DaemonPair `json:"in_process"`
	REST        DaemonPair `json:"rest"`
	// First is how long the first one takes with all of them: it reads each snapshot and
	// checkpoint once.
	First float64 `json:"first_ms"`
}

// store makes templates and checkpoints, so many of each.
func (s *nodeState) store(ctx context.Context, count int) (err error) {
	n, err := s.open(ctx, journal.Cost{NoSync: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	for i := range count {
		spec := sandbox.TemplateSpec{Image: fmt.Sprint("image-", i), MilliCPUs: sandbox.DefaultMilliCPUs, Memory: s.cfg.Memory}
		t, err := n.manager.ApplyTemplate(ctx, benchKey(fmt.Sprint("template-", i)), spec)
		for err == nil {
			var built []sandbox.Build
			if built, err = n.manager.Builds(ctx, t); err == nil && len(built) == 1 && built[0].Phase == sandbox.PhaseReady {
				break
			}
			time.Sleep(time.Millisecond) // there is nothing to wait on
		}
		if err != nil {
			return err
		}
		if _, _, err := n.manager.Checkpoint(ctx, sandbox.CheckpointRequest{Key: benchKey(fmt.Sprint("checkpoint-", i)), Source: recordKey(0).Name}); err != nil {
			return err
		}
	}
	return nil
}

// measureStatus has the two states take turns.
func measureStatus(ctx context.Context, cfg DaemonConfig, empty, full *nodeState) (out DaemonStatus, err error) {
	var process, rest [2][]time.Duration
	for range cfg.Rounds {
		for i, s := range []*nodeState{empty, full} {
			in, by, status, first, err := s.statuses(ctx)
			if err != nil {
				return out, err
			}
			process[i], rest[i] = append(process[i], in...), append(rest[i], by...)
			out.Templates, out.Checkpoints, out.First = len(status.Snapshots)-1, status.Checkpoints, float64(first)/1e6
		}
	}
	out.Process = DaemonPair{Summarize(process[0]), Summarize(process[1])}
	out.REST = DaemonPair{Summarize(rest[0]), Summarize(rest[1])}
	return out, nil
}

// statuses asks for the node's status again and again, in process and by the REST API.
func (s *nodeState) statuses(ctx context.Context) (process, rest []time.Duration, status sandbox.NodeStatus, first time.Duration, err error) {
	n, err := s.open(ctx, journal.Cost{})
	if err != nil {
		return nil, nil, status, 0, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	begin := time.Now()
	if status, err = n.manager.Node(ctx); err != nil {
		return nil, nil, status, 0, err
	}
	first = time.Since(begin)
	if status.Sandboxes != s.records {
		return nil, nil, status, 0, fmt.Errorf("the status has %d sandboxes of %d", status.Sandboxes, s.records)
	}
	settle()
	process, err = askers(s.cfg.For, 1, 0, func(int) error { _, err := n.manager.Node(ctx); return err }, nil)
	if err != nil {
		return nil, nil, status, 0, err
	}
	callers, err := n.callers(ctx, 1)
	if err != nil {
		return nil, nil, status, 0, err
	}
	settle()
	rest, err = askers(s.cfg.For, 1, 0, func(int) error { return callers[0].get(ctx, "/v1/node", http.StatusOK) }, nil)
	return process, rest, status, first, err
}
