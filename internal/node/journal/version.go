package journal

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/bbolt"
)

// Each write of an object, including its deletion, takes the next number: its resource
// version. A stored object begins with the version of its last write. The last version of
// all is in the meta bucket, and is written with each commit. So a number is never given
// twice, even over a restart or a compaction. If a write fails, its number is skipped.

// versioned is the first schema whose values begin with a resource version.
const versioned = 4

// versionSize is the size in bytes of a resource version in a value.
const versionSize = 8

var (
	versionKey = []byte("version")
	idKey      = []byte("id")
)

// Versioned is an object that keeps its resource version.
type Versioned interface{ SetResourceVersion(version uint64) }

// setVersion tells an object its resource version, if the object keeps it.
func setVersion(object any, version uint64) {
	if v, ok := object.(Versioned); ok {
		v.SetResourceVersion(version)
	}
}

// Commit lists writes that were committed together.
type Commit struct {
	// Version is the last resource version that was given.
	Version uint64
	// Changes are in the order of their resource versions.
	Changes []Change
	// Failed says that the file may or may not contain the changes: the disk has confirmed
	// neither. No further commit follows.
	Failed bool
}

// Change is one write of an object.
type Change struct {
	Collection, Key string
	Version         uint64
	// Object is the written object, a T of a Collection[T]; nil if it was
	// deleted.
	Object any
	// Before is the deleted object, for Collection.Decode.
	Before []byte
	// Size is the object's size in the journal in bytes.
	Size int
}

// ObserveCommits sets f, which is told of each commit before its writers are, in order,
// one commit at a time. It must be called before the journal is used by others. f must
// not wait for anything that a caller of Update holds.
func (db *DB) ObserveCommits(f func(Commit)) { db.committed = f }

// ID identifies the journal. It is made up when the file is made, and is unique.
func (db *DB) ID() string { return db.id }

// Version is the resource version of the last write that the transaction sees.
func (tx *Tx) Version() uint64 {
	v := tx.bolt.Bucket(metaBucket).Get(versionKey)
	if len(v) != versionSize {
		return 0 // no object was ever written
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

// join makes a stored value of an object and its resource version.
func (tx *Tx) join(version uint64, body []byte) []byte {
	if tx.plain {
		return body
	}
	return withVersion(version, body)
}

// split takes a stored value apart.
func (tx *Tx) split(v []byte) (version uint64, body []byte, err error) {
	if tx.plain {
		return 0, v, nil
	}
	if len(v) < versionSize {
		return 0, nil, fmt.Errorf("it has %d bytes, fewer than a resource version: the file is damaged", len(v))
	}
	return binary.BigEndian.Uint64(v), v[versionSize:], nil
}

// body returns a stored value without its resource version.
func (tx *Tx) body(v []byte) []byte {
	_, body, _ := tx.split(v) // a damaged value is found when it is read
	return body
}

// putVersion writes the last resource version that was given, and returns the entry's
// place.
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
