package journal

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/bbolt"
)

// maxGroup is how many writes are committed together at most, which bounds how long
// one commit takes.
const maxGroup = 256

// write is a function of Update that waits for its commit.
type write struct {
	do   func(*Tx) error
	done chan struct{} // closed when all following fields are set
	err  error
	// panicked is what do has panicked with, for whoever called Update.
	panicked any
}

// Observe has f told how long each Update took, from the wait for the one before
// to the disk. It is called before the journal is used by others.
func (db *DB) Observe(f func(took time.Duration)) { db.observe = f }

// Update runs f in a transaction: all that it wrote is durable when Update
// returns nil, and none of it otherwise.
//
// Many at once are committed together, by one of the callers: a commit waits for the
// disk twice, however much is in it. Each function still sees what those before it
// wrote, and what one that fails has written is undone. f is called once, in the
// goroutine of another caller perhaps, while no other f runs: it must not wait for
// anything that a caller of Update holds.
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

// commitUntil commits what is queued until w is. The caller has the turn, and gives it
// to whoever is in the queue then.
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

// commitQueued commits the first of the queue together.
func (db *DB) commitQueued() {
	db.mu.Lock()
	n := min(len(db.queue), maxGroup)
	group := db.queue[:n:n]
	db.queue = db.queue[n:]
	if len(db.queue) == 0 {
		db.queue = nil // what was committed is not kept
	}
	db.mu.Unlock()
	err := errors.New("write the journal: a function did not return") // which is only so if it ended its goroutine
	defer func() {
		for _, w := range group {
			if err != nil && w.panicked == nil {
				w.err = err // also where it was refused for what an earlier one wrote
			}
			close(w.done)
		}
	}()
	err = db.commit(group)
}

// commit runs functions in one transaction. Its error is that of all.
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
			_ = bolt.Rollback() // nothing was written
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
	// Not before: what is noted is copied as it is from then on. Also after an error,
	// as more than what was changed is fine.
	db.note(changed)
	if err != nil {
		return db.failed(err)
	}
	db.committed(Commit{Version: db.version, Changes: changes})
	db.mayCompact(used)
	return nil
}

// failed says what a commit has come to that has failed. Mostly nothing of it is in the file.
// Otherwise the file has what its writers are told it has not, and the disk may have neither:
// nothing is written any more, until a daemon begins with what is there.
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
	// plain says that values have no resource versions yet: those of an older schema.
	plain bool
	// last is the resource version that was given last; nil where nothing is written.
	last *uint64
	// before is what was there before each change, in order; changes is what became of it.
	before  []entry
	changes []Change
}

// entry is what a collection has under a key; no value is nothing.
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

// note keeps what is about to be changed. It is a copy: bbolt's may move when the file
// grows.
func (tx *Tx) note(bucket *bbolt.Bucket, e entry) {
	e.value = bytes.Clone(bucket.Get([]byte(e.key)))
	tx.before = append(tx.before, e)
}

// undo brings back what was there before the first change.
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
