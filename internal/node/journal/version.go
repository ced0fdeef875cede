package journal

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/bbolt"
)

// Each write of an object, a deletion included, takes the next number: its resource
// version. An object is kept with that of its last write before it, the last of all is in
// the meta bucket, and is written with each commit. So a number is never given twice, not
// after a restart or a compaction either; one that was taken by a write that failed is left
// out.

// versioned is the first schema whose values begin with a resource version.
const versioned = 4

// versionSize is how many bytes a resource version has in a value.
const versionSize = 8

var (
	versionKey = []byte("version")
	idKey      = []byte("id")
)

// Versioned is an object that knows its resource version.
type Versioned interface{ SetResourceVersion(version uint64) }

// setVersion tells an object its resource version, if it wants to know.
func setVersion(object any, version uint64) {
	if v, ok := object.(Versioned); ok {
		v.SetResourceVersion(version)
	}
}

// Commit is what was written together.
type Commit struct {
	// Version is the last resource version that was given.
	Version uint64
	// Changes are in the order of their resource versions.
	Changes []Change
	// Failed says that the changes may be in the file or not: the disk has said neither. It
	// is the last commit.
	Failed bool
}

// Change is one write of an object.
type Change struct {
	Collection, Key string
	Version         uint64
	// Object is what was written, a T of a Collection[T]; nil if it was deleted.
	Object any
	// Before is what was deleted, for Collection.Decode.
	Before []byte
	// Size is how many bytes the object has in the journal.
	Size int
}

// ObserveCommits has f told of each commit before those who have written it know, in
// order and never twice at once. It is called before the journal is used by others, and f
// must not wait for anything that a caller of Update holds.
func (db *DB) ObserveCommits(f func(Commit)) { db.committed = f }

// ID is the name of the journal: it was made up with the file, and no other has it.
func (db *DB) ID() string { return db.id }

// Version is the resource version of the last write that the transaction sees.
func (tx *Tx) Version() uint64 {
	v := tx.bolt.Bucket(metaBucket).Get(versionKey)
	if len(v) != versionSize {
		return 0 // nothing was ever written
	}
	return binary.BigEndian.Uint64(v)
}

// take takes the next resource version.
func (tx *Tx) take() uint64 {
	*tx.last++
	return *tx.last
}

func withVersion(version uint64, body []byte) []byte {
	return append(binary.BigEndian.AppendUint64(make([]byte, 0, versionSize+len(body)), version), body...)
}

// join makes a value of an object.
func (tx *Tx) join(version uint64, body []byte) []byte {
	if tx.plain {
		return body
	}
	return withVersion(version, body)
}

// split takes a value apart.
func (tx *Tx) split(v []byte) (version uint64, body []byte, err error) {
	if tx.plain {
		return 0, v, nil
	}
	if len(v) < versionSize {
		return 0, nil, fmt.Errorf("it has %d bytes, fewer than a resource version: the file is damaged", len(v))
	}
	return binary.BigEndian.Uint64(v), v[versionSize:], nil
}

// body is a value without its resource version.
func (tx *Tx) body(v []byte) []byte {
	_, body, _ := tx.split(v) // a damaged one is found when it is read
	return body
}

// putVersion writes which resource version was given last, and returns where that is.
func putVersion(tx *bbolt.Tx, version uint64) (entry, error) {
	err := tx.Bucket(metaBucket).Put(versionKey, binary.BigEndian.AppendUint64(nil, version))
	return entry{bucket: string(metaBucket), key: string(versionKey)}, err
}

// identify reads the journal's id and its last resource version. A file without an id gets
// one.
func (db *DB) identify(tx *bbolt.Tx) error {
	meta := tx.Bucket(metaBucket)
	switch v := meta.Get(versionKey); {
	case len(v) == versionSize:
		db.version = max(db.version, binary.BigEndian.Uint64(v))
	case v != nil:
		return errors.New("its last resource version is damaged")
	}
	id := bytes.Clone(meta.Get(idKey))
	if id == nil {
		id = []byte(rand.Text())
		if err := meta.Put(idKey, id); err != nil {
			return err
		}
	}
	db.id = string(id)
	return nil
}
