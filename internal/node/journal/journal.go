// Package journal keeps objects in one file, in transactions that survive a
// kill at any instant. The file has a schema version: an older one is migrated
// forward, a newer one is refused.
package journal

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// Schema is the version of what this build writes.
const Schema = 2

// migrations[n] brings the schema from n+1 to n+2.
var migrations = []func(*Tx) error{
	// Sandboxes say which secrets they hold, and there are quotas. A build that
	// knows nothing of them would write secrets to disk in the clear.
	func(*Tx) error { return nil },
}

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
}

// Tx is a transaction. It is valid within the function that got it.
type Tx struct{ bolt *bbolt.Tx }

// Open opens the journal at path and makes it if there is none.
func Open(path string) (*DB, error) { return open(path, Schema, migrations) }

func open(path string, schema uint32, migrations []func(*Tx) error) (*DB, error) {
	// A daemon that is being replaced may need a moment to let go of the file.
	b, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: 2 * time.Second})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("open %s: %w", path, ErrInUse)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	db := &DB{bolt: b, observe: func(time.Duration) {}}
	if err := db.Update(func(tx *Tx) error { return tx.migrate(schema, migrations) }); err != nil {
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

// Observe has f told how long each Update took, from the wait for the one before
// to the disk. It is called before the journal is used by others.
func (db *DB) Observe(f func(took time.Duration)) { db.observe = f }

// Update runs f in a transaction: all that it wrote is durable when Update
// returns nil, and none of it otherwise.
func (db *DB) Update(f func(*Tx) error) error {
	begin := time.Now()
	defer func() { db.observe(time.Since(begin)) }()
	return db.bolt.Update(func(tx *bbolt.Tx) error { return f(&Tx{tx}) })
}

// View runs f in a transaction that only reads.
func (db *DB) View(f func(*Tx) error) error {
	return db.bolt.View(func(tx *bbolt.Tx) error { return f(&Tx{tx}) })
}

// Collection is a set of objects of one kind, each under a key. Its name is the
// name in the file.
type Collection[T any] string

// Get returns the object under key, and whether there is one.
func (c Collection[T]) Get(tx *Tx, key string) (object T, found bool, err error) {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return object, false, nil
	}
	v := bucket.Get([]byte(key))
	if v == nil {
		return object, false, nil
	}
	if err := c.decode(key, v, &object); err != nil {
		return object, false, err
	}
	return object, true, nil
}

// Put writes an object under key.
func (c Collection[T]) Put(tx *Tx, key string, object T) error {
	bucket, err := tx.bolt.CreateBucketIfNotExists([]byte(c))
	if err != nil {
		return fmt.Errorf("write %s %s: %w", c, key, err)
	}
	v, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("write %s %s: %w", c, key, err)
	}
	if err := bucket.Put([]byte(key), v); err != nil {
		return fmt.Errorf("write %s %s: %w", c, key, err)
	}
	return nil
}

// Delete removes the object under key, if there is one.
func (c Collection[T]) Delete(tx *Tx, key string) error {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return nil
	}
	if err := bucket.Delete([]byte(key)); err != nil {
		return fmt.Errorf("delete %s %s: %w", c, key, err)
	}
	return nil
}

// Each calls f with the objects whose keys begin with prefix, in the order of
// their keys. f may not write to the collection.
func (c Collection[T]) Each(tx *Tx, prefix string, f func(key string, object T) error) error {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return nil
	}
	cursor := bucket.Cursor()
	for k, v := cursor.Seek([]byte(prefix)); k != nil && strings.HasPrefix(string(k), prefix); k, v = cursor.Next() {
		var object T
		if err := c.decode(string(k), v, &object); err != nil {
			return err
		}
		if err := f(string(k), object); err != nil {
			return err
		}
	}
	return nil
}

func (c Collection[T]) decode(key string, v []byte, object *T) error {
	if err := json.Unmarshal(v, object); err != nil {
		return fmt.Errorf("read %s %s: %w", c, key, err)
	}
	return nil
}
