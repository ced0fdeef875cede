package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// DaemonStart measures a daemon that starts with the sandboxes of an earlier one.
type DaemonStart struct {
	// The adoption of each of the Slow sandboxes took Adoption. The Silent ones never
	// answered.
	Slow     int     `json:"slow"`
	Adoption float64 `json:"adoption_ms"`
	Silent   int     `json:"silent"`
	// FirstAnswer is the time until the REST API has answered. Adopted is the time
	// until all other sandboxes were adopted. Both count from the opening of the
	// state folder.
	FirstAnswer float64 `json:"first_answer_ms"`
	Adopted     float64 `json:"adopted_ms"`
	// Journal is the size of the journal in bytes.
	Journal int64 `json:"journal_bytes"`
}

func measureStart(ctx context.Context, cfg DaemonConfig, full *nodeState) (out DaemonStart, err error) {
	if free, ok := full.engine.(*freeEngine); ok {
		out.Silent, out.Slow, out.Adoption = min(cfg.Silent, full.records), min(cfg.Slow, full.records), float64(cfg.Adoption)/1e6
		silent, slow, err := full.machines(ctx, out.Silent, out.Slow)
		if err != nil {
			return out, err
		}
		free.delay(slow, cfg.Adoption, silent, filepath.Join(full.folder, "state", "machines"))
		defer free.delay(nil, 0, nil, "")
	}
	info, err := os.Stat(filepath.Join(full.folder, "state", "journal"))
	if err != nil {
		return out, err
	}
	out.Journal = info.Size()
	settle()
	begin := time.Now()
	n := &benchNode{folder: full.folder}
	defer func() { err = errors.Join(err, n.close()) }()
	if err := n.open(ctx, full.config(journal.Cost{})); err != nil {
		return out, err
	}
	callers, err := n.callers(ctx, 1)
	if err != nil {
		return out, err
	}
	if err := callers[0].get(ctx, sandboxPath(recordKey(0)), http.StatusOK); err != nil {
		return out, err
	}
	out.FirstAnswer = float64(time.Since(begin)) / 1e6
	for i := out.Silent; i < full.records; i++ {
		if err := n.touch(ctx, i); err != nil {
			return out, err
		}
	}
	out.Adopted = float64(time.Since(begin)) / 1e6
	return out, nil
}

// machines returns the ids of the first sandboxes, and of the next ones.
func (s *nodeState) machines(ctx context.Context, first, next int) (_, _ []sandbox.ID, err error) {
	n, err := s.open(ctx, journal.Cost{})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	var all []sandbox.ID
	for i := range min(first+next, s.records) {
		record, err := n.manager.Sandbox(ctx, recordKey(i))
		if err != nil {
			return nil, nil, err
		}
		all = append(all, record.Machine)
	}
	return all[:first], all[first:], nil
}

// DaemonJournal measures single commits to a journal.
type DaemonJournal struct {
	// New measures a new journal. Large measures a journal of LargeBytes. Compacted
	// measures the same journal after its contents were deleted and its file is small
	// again.
	LargeBytes     int64   `json:"large_bytes"`
	CompactedBytes int64   `json:"compacted_bytes"`
	New            Summary `json:"new"`
	Large          Summary `json:"large"`
	Compacted      Summary `json:"compacted"`
	// Compaction is how long the compaction took. Held is how long writers had to
	// wait for it.
	Compaction float64 `json:"compaction_ms"`
	Held       float64 `json:"held_ms"`
}

// measureJournal measures commits to a journal that grows and shrinks again.
func measureJournal(path string, large int64) (_ *DaemonJournal, err error) {
	db, err := journal.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	compacted := make(chan journal.Compaction, 64) // far fewer compactions happen
	db.ObserveCompactions(func(c journal.Compaction) { compacted <- c })
	out := &DaemonJournal{}
	records, filler := journal.Collection[string]("records"), journal.Collection[string]("filler")
	record := strings.Repeat("x", 1<<10)
	commits := func() (Summary, error) {
		const count = 300
		took, err := repeat(nil, count, func() error {
			return db.Update(func(tx *journal.Tx) error { return records.Put(tx, "record", record) })
		})
		return Summarize(took), err
	}
	if out.New, err = commits(); err != nil {
		return nil, err
	}
	const step = 4096 // objects in a commit
	steps := int(large / (step << 10))
	change := func(do func(tx *journal.Tx, key string) error) error {
		for s := range steps {
			if err := db.Update(func(tx *journal.Tx) (err error) {
				for i := range step {
					err = errors.Join(err, do(tx, fmt.Sprintf("%06d/%06d", s, i)))
				}
				return err
			}); err != nil {
				return err
			}
		}
		return nil
	}
	if err := change(func(tx *journal.Tx, key string) error { return filler.Put(tx, key, record) }); err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	out.LargeBytes = info.Size()
	if out.Large, err = commits(); err != nil {
		return nil, err
	}
	if err := change(filler.Delete); err != nil {
		return nil, err
	}
	c := <-compacted
	if c.Err != nil {
		return nil, c.Err
	}
	out.Compaction, out.Held = float64(c.Took)/1e6, float64(c.Held)/1e6
	for {
		// The first compaction may have begun during the deletions.
		if info, err = os.Stat(path); err != nil {
			return nil, err
		}
		if info.Size() < large/4 {
			break
		}
		if c = <-compacted; c.Err != nil {
			return nil, c.Err
		}
	}
	out.CompactedBytes = info.Size()
	out.Compacted, err = commits()
	return out, err
}
