package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// DaemonConfig configures Daemon.
type DaemonConfig struct {
	Guest
	// Free replaces the real engine by one that costs nothing, so that only the
	// daemon's own work is measured.
	Free bool
	// Records is how many sandboxes live. Each has RecordBytes of metadata.
	Records, RecordBytes int
	// Stored is how many templates and checkpoints there are more of each when the node's
	// status is measured, which is only done with the engine that is free of cost.
	Stored int
	// Rounds is how often the empty and the full state take turns. For is the length
	// of each measurement.
	Rounds int
	For    time.Duration
	// Others is how many clients ask for missing sandboxes during look-ups.
	Others int
	// Clients is how many clients claim and end sandboxes at once. SlowClients is how
	// many do so while Added is added to each commit.
	Clients, SlowClients int
	Added                time.Duration
	// When the daemon starts, the first Silent sandboxes never answer, and the
	// adoption of each of the next Slow takes Adoption. Sandboxes of a real engine do
	// neither.
	Slow, Silent int
	Adoption     time.Duration
	// Large is the earlier size in bytes of a journal whose commits are measured; 0
	// leaves this measurement out.
	Large int64
}

// DaemonReport is the result of Daemon.
type DaemonReport struct {
	Engine      string `json:"engine"`
	Records     int    `json:"records"`
	RecordBytes int    `json:"record_bytes"`

	Get     DaemonGet      `json:"get"`
	Page    DaemonPage     `json:"page_of_100"`
	Status  *DaemonStatus  `json:"status,omitempty"`
	Churn   []DaemonChurn  `json:"claim_and_kill"`
	Start   DaemonStart    `json:"start"`
	Journal *DaemonJournal `json:"journal,omitempty"`
}

// Daemon measures the daemon's own costs with many sandboxes: looking up, listing,
// claiming and ending sandboxes, and starting.
func Daemon(ctx context.Context, cfg DaemonConfig) (_ DaemonReport, err error) {
	report := DaemonReport{Engine: string(cfg.engine()), Records: cfg.Records, RecordBytes: cfg.RecordBytes}
	if cfg.Free {
		report.Engine = freeName
	}
	var undo []func() error
	defer func() { err = errors.Join(err, undoAll(undo)) }()
	state := func(name string, records int) *nodeState {
		s := &nodeState{cfg: cfg, folder: filepath.Join(cfg.Folder, name), records: records}
		undo = append(undo, s.close)
		return s
	}
	empty, full, unsynced := state("empty", 1), state("full", cfg.Records), state("unsynced", cfg.Records)
	stored := state("stored", cfg.Records)
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"make sandboxes", func() error {
			return errors.Join(empty.fill(ctx, journal.Cost{}), full.fill(ctx, journal.Cost{NoSync: cfg.Free}))
		}},
		{"look up sandboxes", func() (err error) { report.Get, err = measureGets(ctx, cfg, empty, full); return err }},
		{"list sandboxes", func() (err error) { report.Page, err = measurePages(ctx, cfg, full); return err }},
		{"look at the node", func() (err error) { report.Status, err = lookAtNode(ctx, cfg, empty, stored); return err }},
		{"make sandboxes", func() error { return unsynced.fill(ctx, journal.Cost{NoSync: true}) }},
		{"claim and end sandboxes", func() (err error) {
			report.Churn, err = measureChurn(ctx, cfg, full, unsynced)
			return err
		}},
		{"start", func() (err error) { report.Start, err = measureStart(ctx, cfg, full); return err }},
		{"measure the journal", func() (err error) {
			if cfg.Large > 0 {
				report.Journal, err = measureJournal(filepath.Join(cfg.Folder, "journal"), cfg.Large)
			}
			return err
		}},
	} {
		if err := step.do(); err != nil {
			return report, fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return report, nil
}

// lookAtNode is measureStatus where the engine is free of cost.
func lookAtNode(ctx context.Context, cfg DaemonConfig, empty, stored *nodeState) (*DaemonStatus, error) {
	if !cfg.Free {
		return nil, nil
	}
	err := stored.fill(ctx, journal.Cost{NoSync: true})
	if err == nil {
		err = stored.store(ctx, cfg.Stored)
	}
	if err != nil {
		return nil, err
	}
	out, err := measureStatus(ctx, cfg, empty, stored)
	return &out, err
}

// nodeState is the state that outlives a manager: its state folder, and the engine
// with its machines.
type nodeState struct {
	cfg     DaemonConfig
	folder  string
	records int

	engine engine.Engine
	owner  benchNode // owns the engine
}

func (s *nodeState) config(cost journal.Cost) nodeConfig {
	from := ForkConfig{Guest: s.cfg.Guest, Program: "true"}
	return nodeConfig{
		Root: &rootTemplate{from}, Image: "root", Memory: s.cfg.Memory, Folder: s.folder, Engine: s.cfg.engine(), Jail: s.cfg.Jail,
		Opened: s.engine, Cost: cost,
	}
}

// open opens a manager for the state, and waits until it has adopted all sandboxes.
func (s *nodeState) open(ctx context.Context, cost journal.Cost) (*benchNode, error) {
	n := &benchNode{folder: s.folder}
	err := n.open(ctx, s.config(cost))
	if err == nil {
		err = n.keep(ctx, 0)
	}
	for i := 0; i < s.records && err == nil; i++ {
		err = n.touch(ctx, i)
	}
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// recordKey is the key of one of the sandboxes.
func recordKey(i int) sandbox.Key { return benchKey(fmt.Sprintf("record-%05d", i)) }

// touch waits until the manager has the machine of a sandbox.
func (n *benchNode) touch(ctx context.Context, i int) error {
	u, err := n.manager.Use(ctx, recordKey(i))
	if err == nil {
		u.Close()
	}
	return err
}

// fill makes the state's sandboxes.
func (s *nodeState) fill(ctx context.Context, cost journal.Cost) (err error) {
	if s.cfg.Free {
		s.engine = newFreeEngine()
	} else if s.engine, err = s.owner.openEngine(s.config(cost)); err != nil {
		return err
	}
	n, err := newNode(ctx, s.config(cost))
	defer func() { err = errors.Join(err, n.close()) }()
	if err != nil {
		return err
	}
	spec := sandbox.ClaimSpec{Pool: benchPool}
	if s.cfg.RecordBytes > 0 {
		spec.Metadata = map[string]string{"bench": strings.Repeat("x", s.cfg.RecordBytes)}
	}
	next := make(chan int)
	var workers sync.WaitGroup
	errs := make([]error, 64)
	for w := range errs {
		workers.Go(func() {
			for i := range next {
				if _, _, err := n.manager.Claim(ctx, sandbox.ClaimRequest{Key: recordKey(i), Spec: spec}); err != nil {
					errs[w] = errors.Join(errs[w], err)
				}
			}
		})
	}
	for i := range s.records {
		next <- i
	}
	close(next)
	workers.Wait()
	return errors.Join(errs...)
}

// close ends the machines.
func (s *nodeState) close() (err error) {
	if s.engine == nil {
		return nil
	}
	defer func() { err = errors.Join(err, s.owner.close()) }()
	if s.cfg.Free {
		return nil // no machine runs
	}
	n, err := s.open(context.Background(), journal.Cost{})
	if err != nil {
		return err
	}
	for i := range s.records {
		_, killErr := n.manager.Kill(context.Background(), recordKey(i))
		err = errors.Join(err, killErr)
	}
	return errors.Join(err, n.close())
}

// settle collects the garbage of one measurement before the next.
func settle() { runtime.GC() }
