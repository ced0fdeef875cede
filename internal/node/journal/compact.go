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

// bbolt never gives space back: a file stays as large as it once was. So the journal is
// copied into a new file when most of its pages are free, while others read and write
// it. What is changed meanwhile is noted and copied again, at last while nobody commits,
// which is short: little is left then. The new file takes the name of the old one when it
// is durable. Whoever is killed before has the old one, whoever is killed after has the
// new one, and both have the same in them.

const (
	// compactFrom is how many bytes must be free before the journal is compacted, and
	// compactShare which part of the file.
	compactFrom  = 16 << 20
	compactShare = 0.5
	// A step reads so many bytes, or so many objects, in one transaction: a writer
	// that has to move the file's mapping waits for those that read.
	compactBytes = 1 << 20
	compactCount = 1024
	// catchUps is how often what was changed is copied again before the writers have
	// to wait. Each is shorter than the one before.
	catchUps = 8
	// retryAfter is how long the journal is left alone after it could not be compacted.
	retryAfter = 10 * time.Minute
	// compactSuffix is what the name of the new file ends with until it is whole.
	compactSuffix = ".compact"
)

// Compaction is what came of a compaction.
type Compaction struct {
	// Before and After are how many bytes the journal had.
	Before, After int64
	Took          time.Duration
	// Held is for how long nobody could write.
	Held time.Duration
	Err  error
}

// compacting is a compaction that is under way.
type compacting struct {
	// changed are the objects that were written since it began. The journal's mu
	// protects it.
	changed map[place]bool
	to      *bbolt.DB
	file    *os.File // of to
}

// place is where an object is.
type place struct{ bucket, key string }

// ObserveCompactions has f told of each compaction, one that opening the journal has
// begun included.
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

// mayCompact begins a compaction in the background if the file is worth it. The caller
// has the turn.
func (db *DB) mayCompact(used int64) {
	if !wasteful(db.bolt, used) {
		return
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.closed || db.compacting != nil || time.Now().Before(db.compactAfter) {
		return
	}
	// Whatever is committed from now on is noted.
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
			tell = nil // it was not meant to end
		case tell == nil:
			db.untold = append(db.untold, out)
		}
		db.mu.Unlock()
		if tell != nil {
			tell(out)
		}
		if out.Err == nil {
			// Most of it may have been deleted meanwhile.
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
		// Nothing of the copy is durable before all of it is.
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
	// Most of it is on disk before anybody waits for it.
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
	return after, held, errors.Join(err, old.Close()) // which waits for those who read it
}

// copyAll copies all objects, and then what was changed meanwhile until that is little.
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

// entriesAfter are the next entries of a bucket, as many as one step takes.
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

// copyChanged copies objects as they are now.
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

// write writes entries to the new file; those without a value are deleted there.
func (c *compacting) write(entries []entry) error {
	return c.to.Update(func(tx *bbolt.Tx) error {
		for _, e := range entries {
			bucket, err := tx.CreateBucketIfNotExists([]byte(e.bucket))
			if err != nil {
				return err
			}
			bucket.FillPercent = 0.9 // most come in the order of their keys
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

// note notes what was committed, for the compaction that is under way.
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

// takeChanged takes what was changed since it was last taken.
func (db *DB) takeChanged(c *compacting) map[place]bool {
	db.mu.Lock()
	defer db.mu.Unlock()
	changed := c.changed
	c.changed = map[place]bool{}
	return changed
}

// replace makes the new file the journal, while nobody commits, and returns the old one;
// nil if that is still the journal.
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
		// A power cut may bring either of the two files back: none is written any more.
		db.broken = fmt.Errorf("the name of the compacted journal is not durable, start the daemon again: %w", err)
	}
	db.swap.Lock()
	old, db.bolt, db.file, db.aside = db.bolt, c.to, c.file, aside
	db.swap.Unlock()
	return old, 0, db.broken
}

// errClosed ends a compaction.
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
