// Package journal keeps objects in one file, in transactions that survive a
// kill at any instant. The file has a schema version: an older one is migrated
// forward, a newer one is refused.
package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// Schema is the version of what this build writes.
const Schema = 3

var (
	metaBucket = []byte("meta")
	schemaKey  = []byte("schema")
)

// ErrNewer says that the journal was written by a newer build.
var ErrNewer = errors.New("the state was written by a newer version")

// ErrInUse says that another process has the journal open.
var ErrInUse = errors.New("the state is in use by another daemon")

// DB is an open journal. Its methods are safe for concurrent use.
type DB struct {
	bolt    *bbolt.DB
	observe func(took time.Duration)
	cost    Cost
	// turn holds one token while nobody commits.
	turn chan struct{}

	mu    sync.Mutex // protects queue
	queue []*write
}

// Cost is what a commit costs beside its work. It is for measurements.
type Cost struct {
	// NoSync leaves out the wait for the disk: what is written does not survive the
	// host's end.
	NoSync bool
	// Before is called before each commit, if it is set.
	Before func()
}

// Open opens the journal at path and makes it if there is none.
func Open(path string) (*DB, error) { return OpenAt(path, Cost{}) }

// OpenAt is Open with another cost of commits.
func OpenAt(path string, cost Cost) (*DB, error) { return open(path, Schema, migrations, cost) }

func open(path string, schema uint32, migrations []func(*Tx) error, cost Cost) (*DB, error) {
	b, err := bbolt.Open(path, 0o600, &bbolt.Options{
		// A daemon that is being replaced may need a moment to let go of the file.
		Timeout: 2 * time.Second,
		// The list of free pages is found again when the file is opened. Written with
		// each commit, it makes those slow in a file that was once large.
		FreelistType: bbolt.FreelistMapType, NoFreelistSync: true,
		NoSync: cost.NoSync,
	})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("open %s: %w", path, ErrInUse)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	db := &DB{bolt: b, observe: func(time.Duration) {}, cost: cost, turn: make(chan struct{}, 1)}
	db.turn <- struct{}{}
	if err := b.Update(func(tx *bbolt.Tx) error { return (&Tx{bolt: tx}).migrate(schema, migrations) }); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), b.Close())
	}
	return db, nil
}

// migrate brings an older journal to schema.
func (tx *Tx) migrate(schema uint32, migrations []func(*Tx) error) error {
	meta, err := tx.bolt.CreateBucketIfNotExists(metaBucket)
	if err != nil {
		return err
	}
	have := schema // of a new file
	if v := meta.Get(schemaKey); v != nil {
		if len(v) != 4 {
			return fmt.Errorf("its schema version has %d bytes instead of 4: the file is damaged", len(v))
		}
		have = binary.LittleEndian.Uint32(v)
	}
	if have > schema || have == 0 {
		return fmt.Errorf("%w: schema %d, this one knows %d. Start the version that wrote it", ErrNewer, have, schema)
	}
	for ; have < schema; have++ {
		if err := migrations[have-1](tx); err != nil {
			return fmt.Errorf("migrate from schema %d: %w", have, err)
		}
	}
	return meta.Put(schemaKey, binary.LittleEndian.AppendUint32(nil, schema))
}

// Close waits for transactions that are under way.
func (db *DB) Close() error { return db.bolt.Close() }

// View runs f in a transaction that only reads.
func (db *DB) View(f func(*Tx) error) error {
	return db.bolt.View(func(tx *bbolt.Tx) error { return f(&Tx{bolt: tx}) })
}
