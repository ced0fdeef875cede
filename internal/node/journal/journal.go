// Package journal keeps objects in one file, in transactions that survive a
// kill at any instant. The file has a schema version: an older one is migrated
// forward, a newer one is refused. Each write of an object has a number of its own,
// the object's resource version, which only ever grows.
package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/durable"
	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// Schema is the version of what this build writes.
const Schema = 5

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
	path string
	// id is that of the file, over compactions and restarts.
	id      string
	observe func(took time.Duration)
	// committed is told of each commit, by whoever has the turn.
	committed func(Commit)
	cost      Cost
	plain     bool // see Tx
	// rename gives the file of a compaction the journal's name.
	rename func(from, to string) error
	work   sync.WaitGroup // compactions
	// turn holds one token while nobody commits.
	turn chan struct{}
	// version is the resource version that was given last; whoever has the turn uses it.
	version uint64
	// file is that of bolt, aside the room that it has beyond what is used of it; whoever
	// has the turn uses both.
	file  *os.File
	aside durable.Aside
	short atomic.Bool
	// broken is why nothing can be written any more; whoever has the turn uses it.
	broken error

	// swap protects bolt, which whoever has the turn may read without it: a compaction
	// replaces it with both.
	swap sync.RWMutex
	bolt *bbolt.DB

	mu           sync.Mutex // protects all following fields
	queue        []*write
	closed       bool
	compacting   *compacting // nil if none is under way
	compactAfter time.Time   // before which none is begun
	compacted    func(Compaction)
	untold       []Compaction // that ended before there was somebody to tell
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
	b, file, err := openCurrent(path, cost)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	db := &DB{
		path: path, bolt: b, file: file, observe: func(time.Duration) {}, committed: func(Commit) {}, cost: cost, plain: schema < versioned,
		rename: durable.Rename, turn: make(chan struct{}, 1),
	}
	var used int64
	if err := b.Update(func(tx *bbolt.Tx) error {
		used = tx.Size()
		if err := (&Tx{bolt: tx, last: &db.version}).migrate(schema, migrations); err != nil {
			return err
		}
		return db.identify(tx)
	}); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), b.Close())
	}
	// A compaction that was killed has left it.
	if err := removeIfThere(path + compactSuffix); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), b.Close())
	}
	if err := db.setAside(used); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), b.Close())
	}
	db.mayCompact(used)
	db.turn <- struct{}{}
	return db, nil
}

// letGo is how long a daemon that is being replaced may need to let go of the file.
const letGo = 2 * time.Second

// openCurrent opens the file that has the journal's name. A compaction of another daemon
// may give the name to another file while this one waits for it.
func openCurrent(path string, cost Cost) (*bbolt.DB, *os.File, error) {
	for begin := time.Now(); ; {
		b, file, err := openFile(path, cost)
		if errors.Is(err, bolterrors.ErrTimeout) {
			return nil, nil, ErrInUse
		}
		if err != nil {
			return nil, nil, err
		}
		now, err := os.Stat(path)
		switch {
		case err == nil && sameFile(now, file):
			return b, file, nil
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return nil, nil, errors.Join(err, b.Close())
		}
		if err := b.Close(); err != nil {
			return nil, nil, err
		}
		if time.Since(begin) > letGo {
			return nil, nil, ErrInUse
		}
	}
}

// openFile opens a bbolt file, and returns what it has open.
func openFile(path string, cost Cost) (b *bbolt.DB, file *os.File, err error) {
	b, err = bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout: letGo,
		// The list of free pages is found again when the file is opened. Written with
		// each commit, it makes those slow in a file that was once large.
		FreelistType: bbolt.FreelistMapType, NoFreelistSync: true,
		NoSync: cost.NoSync,
		OpenFile: func(name string, flag int, mode os.FileMode) (*os.File, error) {
			file, err = os.OpenFile(name, flag, mode)
			return file, err
		},
	})
	return b, file, err
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
		tx.plain = have < versioned
		if err := migrations[have-1](tx); err != nil {
			return fmt.Errorf("migrate from schema %d: %w", have, err)
		}
	}
	return meta.Put(schemaKey, binary.LittleEndian.AppendUint32(nil, schema))
}

// Close waits for transactions that are under way.
func (db *DB) Close() error {
	db.mu.Lock()
	db.closed = true
	db.mu.Unlock()
	db.work.Wait()
	<-db.turn // whoever has committed looks at the file afterwards
	defer func() { db.turn <- struct{}{} }()
	return db.bolt.Close()
}

// View runs f in a transaction that only reads.
func (db *DB) View(f func(*Tx) error) error {
	db.swap.RLock()
	tx, err := db.bolt.Begin(false)
	db.swap.RUnlock()
	if err != nil {
		return fmt.Errorf("read the journal: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // it has only read
	return f(&Tx{bolt: tx, plain: db.plain})
}
