package journal

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"agentrun.dev/internal/durable"
	"go.etcd.io/bbolt"
)

// bbolt never gives space back: its file never shrinks. So when most of the journal's
// pages are free, the journal is copied into a new file, while other goroutines read and
// write it. Objects that are changed meanwhile are noted and copied again. The last of
// them are copied while commits wait, which is short, because only a few are left. When
// the new file is durable, it takes the name of the old one. After a kill before that,
// the next daemon finds the old file; after it, the new one. Both have the same content.

const (
	// compactFrom is how many bytes must be free before the journal is compacted, and
	// compactShare is the part of the file that must be free.
	compactFrom  = 16 << 20
	compactShare = 0.5
	// One transaction of the copy reads at most this many bytes, or this many
	// objects: a writer that has to move the file's mapping waits for its readers.
	compactBytes = 1 << 20
	compactCount = 1024
	// catchUps is how often changed objects are copied again before the writers have
	// to wait. Each round is shorter than the one before.
	catchUps = 8
	// retryAfter is the pause after a compaction that failed.
	retryAfter = 10 * time.Minute
	// compactSuffix ends the name of the new file until it is complete.
	compactSuffix = ".compact"
)

// Compaction is the result of a compaction.
type Compaction struct {
	// Before and After are the sizes of the journal in bytes.
	Before, After int64
	Took          time.Duration
	// Held is how long writers had to wait.
	Held time.Duration
	Err  error
}

// compacting is a compaction that is under way.
type compacting struct {
	// changed lists the objects that were written since the compaction began.
	// The journal's mu protects it.
	changed map[place]bool
	to      *bbolt.DB
	file    *os.File // the file of to
}

// place is the bucket and the key of an object.
type place struct{ bucket, key string }

// ObserveCompactions sets f, which is told of each compaction. It is also told of
// one that began when the journal was opened.
func (db *DB) ObserveCompactions(f func(Compaction)) {
	db.mu.Lock()
	untold := db.untold
	db.compacted, db.untold = f, nil
	db.mu.Unlock()
	for _, c := range untold {
		f(c)
	}
}

// wasteful reports whether most of the file is free.
func wasteful(b *bbolt.DB, used int64) bool {
	st := b.Stats()
	free := int64(st.FreePageN+st.PendingPageN) * int64(b.Info().PageSize)
	return free >= compactFrom && float64(free) >= compactShare*float64(used)
}

// mayCompact begins a compaction in the background if enough of the file is free. The
// caller has the turn.
func (db *DB) mayCompact(used int64) {
	if !wasteful(db.bolt, used) {
		return
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.closed || db.compacting != nil || time.Now().Before(db.compactAfter) {
		return
	}
	// From now on each commit is noted for it.
	c := &compacting{changed: map[place]bool{}}
	db.compacting = c
	db.work.Go(func() {
		begin := time.Now()
		out := Compaction{Before: used}
		out.After, out.Held, out.Err = db.compact(c)
		out.Took = time.Since(begin)
		db.mu.Lock()
		db.compacting = nil
		if out.Err != nil {
			db.compactAfter = time.Now().Add(retryAfter)
		}
		tell := db.compacted
		switch {
		case errors.Is(out.Err, errClosed):
			tell = nil // closing the journal has ended it, which is no failure
		case tell == nil:
			db.untold = append(db.untold, out)
		}
		db.mu.Unlock()
		if tell != nil {
			tell(out)
		}
		if out.Err == nil {
			// Most objects may have been deleted in the meantime.
			<-db.turn
			db.mayCompact(out.After)
			db.turn <- struct{}{}
		}
	})
}

// compact copies the journal into a new file, which becomes the journal.
func (db *DB) compact(c *compacting) (after int64, held time.Duration, err error) {
	path := db.path + compactSuffix
	if err = removeIfThere(path); err == nil {
		// The copy need not be durable until it is complete.
		c.to, c.file, err = openFile(path, Cost{NoSync: true})
	}
	if err != nil {
		return 0, 0, fmt.Errorf("compact the journal: %w", err)
	}
	kept := false
	defer func() {
		if !kept {
			err = errors.Join(err, c.to.Close(), os.Remove(path))
		}
	}()
	if err := c.copyAll(db); err != nil {
		return 0, 0, fmt.Errorf("compact the journal: %w", err)
	}
	// So most of it is on disk before commits have to wait for it.
	if err := durable.Sync(c.file); err != nil {
		return 0, 0, fmt.Errorf("compact the journal: %w", err)
	}
	old, held, err := db.replace(c, path)
	if err != nil {
		err = fmt.Errorf("compact the journal: %w", err)
	}
	if kept = old != nil; !kept {
		return 0, held, err
	}
	err = errors.Join(err, db.View(func(tx *Tx) error {
		after = tx.bolt.Size()
		return nil
	}))
	return after, held, errors.Join(err, old.Close()) // Close waits for its readers
}

// copyAll copies all objects, and then those that were changed meanwhile, until only a
// few are left.
func (c *compacting) copyAll(db *DB) error {
	var buckets []string
	if err := db.View(func(tx *Tx) error {
		return tx.bolt.ForEach(func(name []byte, _ *bbolt.Bucket) error {
			buckets = append(buckets, string(name))
			return nil
		})
	}); err != nil {
		return err
	}
	for _, bucket := range buckets {
		if err := c.copyBucket(db, bucket); err != nil {
			return err
		}
	}
	for range catchUps {
		changed := db.takeChanged(c)
		if err := c.copyChanged(db, changed); err != nil || len(changed) <= maxGroup {
			return err
		}
	}
	return nil
}

// copyBucket copies a bucket in steps.
func (c *compacting) copyBucket(db *DB, bucket string) error {
	for after := []byte(nil); ; {
		var some []entry
		if err := db.View(func(tx *Tx) error {
			some = entriesAfter(tx.bolt.Bucket([]byte(bucket)), bucket, after)
			return nil
		}); err != nil {
			return err
		}
		if err := c.write(some); err != nil || len(some) == 0 {
			return err
		}
		after = []byte(some[len(some)-1].key)
		if db.isClosed() {
			return errClosed
		}
	}
}

// entriesAfter returns the next entries of a bucket, as many as one step takes.
func entriesAfter(from *bbolt.Bucket, bucket string, after []byte) (some []entry) {
	if from == nil {
		return nil
	}
	cursor := from.Cursor()
	k, v := cursor.Seek(after)
	if after != nil && bytes.Equal(k, after) {
		k, v = cursor.Next()
	}
	for size := 0; k != nil && size < compactBytes && len(some) < compactCount; k, v = cursor.Next() {
		some = append(some, entry{bucket, string(k), bytes.Clone(v)})
		size += len(k) + len(v)
	}
	return some
}

// copyChanged copies the current values of changed objects.
func (c *compacting) copyChanged(db *DB, changed map[place]bool) error {
	some := make([]entry, 0, min(len(changed), compactCount))
	flush := func() error {
		err := db.View(func(tx *Tx) error {
			for i := range some {
				some[i].value = nil
				if b := tx.bolt.Bucket([]byte(some[i].bucket)); b != nil {
					some[i].value = bytes.Clone(b.Get([]byte(some[i].key)))
				}
			}
			return nil
		})
		if err == nil {
			err = c.write(some)
		}
		some = some[:0]
		return err
	}
	for p := range changed {
		if some = append(some, entry{bucket: p.bucket, key: p.key}); len(some) < compactCount {
			continue
		}
		if err := flush(); err != nil {
			return err
		}
	}
	return flush()
}

// write writes entries to the new file. It deletes the keys of entries without a
// value.
func (c *compacting) write(entries []entry) error {
	return c.to.Update(func(tx *bbolt.Tx) error {
		for _, e := range entries {
			bucket, err := tx.CreateBucketIfNotExists([]byte(e.bucket))
			if err != nil {
				return err
			}
			bucket.FillPercent = 0.9 // most keys come in order
			if e.value == nil {
				err = bucket.Delete([]byte(e.key))
			} else {
				err = bucket.Put([]byte(e.key), e.value)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// note records committed changes for the compaction that is under way.
func (db *DB) note(changed []entry) {
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.compacting == nil {
		return
	}
	for _, e := range changed {
		db.compacting.changed[place{e.bucket, e.key}] = true
	}
}

// takeChanged returns the objects that were changed since its last call.
func (db *DB) takeChanged(c *compacting) map[place]bool {
	db.mu.Lock()
	defer db.mu.Unlock()
	changed := c.changed
	c.changed = map[place]bool{}
	return changed
}

// replace makes the new file the journal, while commits wait, and returns the old one.
// It returns nil if the old one is still the journal.
func (db *DB) replace(c *compacting, path string) (old *bbolt.DB, held time.Duration, err error) {
	<-db.turn
	defer func() { db.turn <- struct{}{} }()
	begin := time.Now()
	defer func() { held = time.Since(begin) }()
	if db.isClosed() {
		return nil, 0, errClosed
	}
	if err := c.copyChanged(db, db.takeChanged(c)); err != nil {
		return nil, 0, err
	}
	if !db.cost.NoSync {
		if err := durable.Sync(c.file); err != nil {
			return nil, 0, err
		}
	}
	aside, err := db.asideFor(c)
	if err != nil {
		return nil, 0, err
	}
	c.to.NoSync = db.cost.NoSync
	if err := db.rename(path, db.path); err != nil {
		if now, statErr := os.Stat(db.path); statErr != nil || !sameFile(now, c.file) {
			return nil, 0, errors.Join(err, statErr)
		}
		// After a power cut, either file may have the journal's name. So the journal
		// refuses all further writes.
		db.broken = fmt.Errorf("the name of the compacted journal is not durable, start the daemon again: %w", err)
	}
	db.swap.Lock()
	old, db.bolt, db.file, db.aside = db.bolt, c.to, c.file, aside
	db.swap.Unlock()
	return old, 0, db.broken
}

// errClosed ends a compaction because the journal is being closed.
var errClosed = errors.New("the journal is being closed")

func (db *DB) isClosed() bool {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.closed
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func sameFile(a fs.FileInfo, f *os.File) bool {
	b, err := f.Stat()
	return err == nil && os.SameFile(a, b)
}
