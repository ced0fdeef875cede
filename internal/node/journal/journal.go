// Package journal keeps objects in one file, in transactions that survive a kill at
// any instant. The file has a schema version: an older file is migrated forward, a
// newer one is refused. Each write of an object gets a number, the object's
// resource version; later writes get greater numbers.
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

// Schema is the schema version that this build writes.
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
	// id identifies the file. It survives compactions and restarts.
	id      string
	observe func(took time.Duration)
	// committed is told of each commit, by the goroutine that has the turn.
	committed func(Commit)
	cost      Cost
	plain     bool // see Tx
	// rename gives the file of a compaction the journal's name.
	rename func(from, to string) error
	work   sync.WaitGroup // compactions
	// turn holds one token, which is taken by the goroutine that commits.
	turn chan struct{}
	// version is the last resource version that was given. It is used only with the
	// turn.
	version uint64
	// file is the file of bolt. aside is the room that it has reserved beyond its used
	// part. Both are used only with the turn.
	file  *os.File
	aside durable.Aside
	short atomic.Bool
	// broken is the reason why all further writes are refused. It is used only
	// with the turn.
	broken error

	// swap protects bolt. The goroutine that has the turn may read bolt without it: a
	// compaction replaces bolt only with both.
	swap sync.RWMutex
	bolt *bbolt.DB

	mu           sync.Mutex // protects all following fields
	queue        []*write
	closed       bool
	compacting   *compacting // nil if none is under way
	compactAfter time.Time   // no compaction begins before this time
	compacted    func(Compaction)
	untold       []Compaction // that ended before ObserveCompactions was called
}

// Cost is the cost of a commit besides its work. It is for measurements.
type Cost struct {
	// NoSync leaves out the wait for the disk: writes are lost if the host goes
	// down.
	NoSync bool
	// Before, if it is set, is called before each commit.
	Before func()
}

// Open opens the journal at path, and makes it if it does not exist.
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
	// A compaction that was killed may have left this file.
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

// letGo bounds how long a daemon that is being replaced may take to close the file.
const letGo = 2 * time.Second

// openCurrent opens the file that has the journal's name. While it waits for the file, a
// compaction of another daemon may give that name to another file.
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

// openFile opens a bbolt file, and returns it with its open file.
func openFile(path string, cost Cost) (b *bbolt.DB, file *os.File, err error) {
	b, err = bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout: letGo,
		// The list of free pages is rebuilt when the file is opened. Writing it with
		// each commit would make commits slow in a file that was once large.
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
	have := schema // the schema of a new file
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
	<-db.turn // after its commit, the holder of the turn still looks at the file
	defer func() { db.turn <- struct{}{} }()
	return db.bolt.Close()
}

// View runs f in a read-only transaction.
func (db *DB) View(f func(*Tx) error) error {
	db.swap.RLock()
	tx, err := db.bolt.Begin(false)
	db.swap.RUnlock()
	if err != nil {
		return fmt.Errorf("read the journal: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // the transaction has only read
	return f(&Tx{bolt: tx, plain: db.plain})
}
