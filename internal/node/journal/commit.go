package journal

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/bbolt"
)

// maxGroup bounds how many writes are committed together, and so how long one
// commit takes.
const maxGroup = 256

// write is one call of Update that waits for its commit.
type write struct {
	do   func(*Tx) error
	done chan struct{} // closed when all following fields are set
	err  error
	// panicked is the value that do panicked with. Update panics with it in the
	// goroutine of its caller.
	panicked any
}

// Observe sets f, which is told the duration of each Update, from the wait for
// the previous commit until the data is on disk. It must be called before the
// journal is used by others.
func (db *DB) Observe(f func(took time.Duration)) { db.observe = f }

// Update runs f in a transaction. If Update returns nil, all writes of f are
// durable; otherwise f has written nothing.
//
// Concurrent calls are committed together, by one of the callers: a commit waits for
// the disk twice, regardless of its size. Each function sees the writes of those
// before it, and the writes of a function that fails are undone. f is called once,
// possibly in the goroutine of another caller, while no other f runs. So f must not
// wait for anything that a caller of Update holds.
func (db *DB) Update(f func(*Tx) error) error {
	begin := time.Now()
	defer func() { db.observe(time.Since(begin)) }()
	w := &write{do: f, done: make(chan struct{})}
	db.mu.Lock()
	db.queue = append(db.queue, w)
	db.mu.Unlock()
	select {
	case <-w.done:
	case <-db.turn:
		db.commitUntil(w)
	}
	if w.panicked != nil {
		panic(w.panicked)
	}
	return w.err
}

// commitUntil commits groups of the queue until w is committed. The caller has the
// turn, which then passes to one of the callers in the queue.
func (db *DB) commitUntil(w *write) {
	defer func() { db.turn <- struct{}{} }()
	for {
		select {
		case <-w.done:
			return
		default:
			db.commitQueued()
		}
	}
}

// commitQueued commits the first writes of the queue together.
func (db *DB) commitQueued() {
	db.mu.Lock()
	n := min(len(db.queue), maxGroup)
	group := db.queue[:n:n]
	db.queue = db.queue[n:]
	if len(db.queue) == 0 {
		db.queue = nil // committed writes can be freed
	}
	db.mu.Unlock()
	err := errors.New("write the journal: a function did not return") // unless commit returns
	defer func() {
		for _, w := range group {
			if err != nil && w.panicked == nil {
				w.err = err // a function may also have refused because of a write that is now undone
			}
			close(w.done)
		}
	}()
	err = db.commit(group)
}

// commit runs functions in one transaction. Its error applies to all of them.
func (db *DB) commit(group []*write) error {
	if db.broken != nil {
		return db.broken
	}
	bolt, err := db.bolt.Begin(true)
	if err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	var changed []entry
	var changes []Change
	committed := false
	defer func() {
		if !committed {
			_ = bolt.Rollback() // no write was committed
		}
	}()
	for _, w := range group {
		tx := &Tx{bolt: bolt, plain: db.plain, last: &db.version}
		if w.run(tx); w.err == nil && w.panicked == nil {
			changed, changes = append(changed, tx.before...), append(changes, tx.changes...)
			continue
		}
		if err := tx.undo(); err != nil {
			return fmt.Errorf("undo what was written before an error: %w", err)
		}
	}
	if len(changed) == 0 {
		return nil
	}
	last, err := putVersion(bolt, db.version)
	if err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	changed = append(changed, last)
	if db.cost.Before != nil {
		db.cost.Before()
	}
	used := bolt.Size()
	if err := db.setAside(used); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	committed = true
	err = bolt.Commit()
	// note comes after the commit, because a compaction copies the noted objects as
	// they are from then on. It also comes after a failed commit: copying unchanged
	// objects does no harm.
	db.note(changed)
	if err != nil {
		return db.failed(err)
	}
	db.committed(Commit{Version: db.version, Changes: changes})
	db.mayCompact(used)
	return nil
}

// failed returns the error of a commit that has failed. Usually the commit has left the file
// unchanged. Otherwise the file contains writes whose callers are told that they failed, and
// the disk may lack them: then the journal refuses all further writes, until a new daemon
// starts from the file.
func (db *DB) failed(err error) error {
	err = fmt.Errorf("write the journal: %w", err)
	var there uint64
	lookErr := db.bolt.View(func(tx *bbolt.Tx) error { there = (&Tx{bolt: tx}).Version(); return nil })
	if lookErr == nil && there < db.version {
		return err
	}
	db.broken = errors.Join(fmt.Errorf("%w: nothing is written before the daemon is started again", err), lookErr)
	db.committed(Commit{Version: db.version, Failed: true})
	return db.broken
}

func (w *write) run(tx *Tx) {
	defer func() { w.panicked = recover() }()
	w.err = w.do(tx)
}

// Tx is a transaction. It is valid within the function that got it.
type Tx struct {
	bolt *bbolt.Tx
	// plain says that values have no resource versions: they have an older schema.
	plain bool
	// last is the last resource version that was given; nil in a transaction that
	// only reads.
	last *uint64
	// before lists the value of each changed entry before the change, in order; changes
	// lists the results.
	before  []entry
	changes []Change
}

// entry is one key of a collection with its value; without a value the key does
// not exist.
type entry struct {
	bucket, key string
	value       []byte
}

func (tx *Tx) put(bucket *bbolt.Bucket, e entry) error {
	tx.note(bucket, e)
	if err := bucket.Put([]byte(e.key), e.value); err != nil {
		return fmt.Errorf("write %s %s: %w", e.bucket, e.key, err)
	}
	return nil
}

func (tx *Tx) delete(bucket *bbolt.Bucket, e entry) error {
	tx.note(bucket, e)
	if err := bucket.Delete([]byte(e.key)); err != nil {
		return fmt.Errorf("delete %s %s: %w", e.bucket, e.key, err)
	}
	return nil
}

// note keeps the value of an entry before it is changed. It copies the value, because
// bbolt may move its own when the file grows.
func (tx *Tx) note(bucket *bbolt.Bucket, e entry) {
	e.value = bytes.Clone(bucket.Get([]byte(e.key)))
	tx.before = append(tx.before, e)
}

// undo restores the values from before the first change.
func (tx *Tx) undo() error {
	for i := len(tx.before) - 1; i >= 0; i-- {
		e := tx.before[i]
		bucket, err := tx.bolt.CreateBucketIfNotExists([]byte(e.bucket))
		if err != nil {
			return err
		}
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
}
