package journal

import (
	"errors"

	"agentrun.dev/internal/durable"
	"go.etcd.io/bbolt"
)

// Room on the disk is set aside for the growth of the journal: a sixteenth of the disk, at
// most 16 MiB. Operations that end or delete objects need some of it while the disk is full.
const (
	asidePart = 16
	mostAside = 16 << 20
)

// Short reports whether the disk is full, and less than half of the room that was set
// aside for the journal is left.
func (db *DB) Short() bool {
	if !db.short.Load() {
		return false
	}
	<-db.turn
	defer func() { db.turn <- struct{}{} }()
	if err := db.View(func(tx *Tx) error { return db.setAside(tx.bolt.Size()) }); err != nil {
		return true // the next writer gets the error
	}
	return db.short.Load()
}

// setAside makes sure that the file can grow. The caller has the turn, or opens the journal.
func (db *DB) setAside(used int64) error {
	if db.aside.Most == 0 {
		var err error
		if db.aside.Most, err = durable.ShareOf(db.file, asidePart, mostAside); err != nil {
			return err
		}
	}
	short, err := db.aside.Keep(db.file, used)
	db.short.Store(short)
	return err
}

// asideFor sets the same room aside for a file that is about to become the
// journal's.
func (db *DB) asideFor(c *compacting) (durable.Aside, error) {
	a := durable.Aside{Most: db.aside.Most}
	err := c.to.View(func(tx *bbolt.Tx) error {
		short, err := a.Keep(c.file, tx.Size())
		if err == nil && short {
			err = errNoAside
		}
		return err
	})
	return a, err
}

// errNoAside ends a compaction: the current journal keeps its room.
var errNoAside = errors.New("the disk has no room to set aside for the new file")
