package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Collection is a set of objects of one kind, each under a key. Its value is
// its name in the file.
type Collection[T any] string

// Get returns the object under key, and whether it exists.
func (c Collection[T]) Get(tx *Tx, key string) (object T, found bool, err error) {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return object, false, nil
	}
	v := bucket.Get([]byte(key))
	if v == nil {
		return object, false, nil
	}
	if err := c.decode(tx, key, v, &object); err != nil {
		return object, false, err
	}
	return object, true, nil
}

// Put writes an object under key.
func (c Collection[T]) Put(tx *Tx, key string, object T) error { return c.Write(tx, key, &object) }

// Write is Put for callers that keep using the object: afterwards it has its new
// resource version.
func (c Collection[T]) Write(tx *Tx, key string, object *T) error {
	bucket, err := tx.bolt.CreateBucketIfNotExists([]byte(c))
	if err != nil {
		return fmt.Errorf("write %s %s: %w", c, key, err)
	}
	body, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("write %s %s: %w", c, key, err)
	}
	version := tx.take()
	if err := tx.put(bucket, entry{string(c), key, tx.join(version, body)}); err != nil {
		return err
	}
	setVersion(object, version)
	tx.changes = append(tx.changes, Change{Collection: string(c), Key: key, Version: version, Object: *object, Size: len(body)})
	return nil
}

// Delete removes the object under key, if it exists.
func (c Collection[T]) Delete(tx *Tx, key string) error {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return nil
	}
	before := bucket.Get([]byte(key))
	if before == nil {
		return nil
	}
	change := Change{Collection: string(c), Key: key, Version: tx.take(), Before: tx.body(bytes.Clone(before))}
	if err := tx.delete(bucket, entry{bucket: string(c), key: key}); err != nil {
		return err
	}
	tx.changes = append(tx.changes, change)
	return nil
}

// Size is how many bytes the object under key takes, 0 if it does not exist.
func (c Collection[T]) Size(tx *Tx, key string) int {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return 0
	}
	return len(tx.body(bucket.Get([]byte(key))))
}

// Version returns the resource version of the object under key, and whether it exists.
// That costs less than reading the object.
func (c Collection[T]) Version(tx *Tx, key string) (version uint64, found bool) {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return 0, false
	}
	v := bucket.Get([]byte(key))
	if v == nil {
		return 0, false
	}
	version, _, _ = tx.split(v) // a damaged value is found when it is read
	return version, true
}

// Each calls f with the objects whose keys begin with prefix, in the order of
// their keys. f may not write to the collection.
func (c Collection[T]) Each(tx *Tx, prefix string, f func(key string, object T) error) error {
	return c.EachAfter(tx, prefix, "", f)
}

// EachAfter is Each for the keys after prefix+after. It does not read earlier
// objects.
func (c Collection[T]) EachAfter(tx *Tx, prefix, after string, f func(key string, object T) error) error {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return nil
	}
	cursor := bucket.Cursor()
	k, v := cursor.Seek([]byte(prefix + after))
	if after != "" && string(k) == prefix+after {
		k, v = cursor.Next()
	}
	for ; k != nil && strings.HasPrefix(string(k), prefix); k, v = cursor.Next() {
		var object T
		if err := c.decode(tx, string(k), v, &object); err != nil {
			return err
		}
		if err := f(string(k), object); err != nil {
			return err
		}
	}
	return nil
}

// Keys calls f with the keys that begin with prefix, in order, and with the resource
// versions of their objects, which are not read.
func (c Collection[T]) Keys(tx *Tx, prefix string, f func(key string, version uint64) error) error {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return nil
	}
	cursor := bucket.Cursor()
	for k, v := cursor.Seek([]byte(prefix)); k != nil && strings.HasPrefix(string(k), prefix); k, v = cursor.Next() {
		version, _, err := tx.split(v)
		if err != nil {
			return fmt.Errorf("read %s %s: %w", c, k, err)
		}
		if err := f(string(k), version); err != nil {
			return err
		}
	}
	return nil
}

// First returns the first object whose key begins with prefix, and whether it exists.
func (c Collection[T]) First(tx *Tx, prefix string) (key string, object T, found bool, err error) {
	err = c.Each(tx, prefix, func(k string, o T) error {
		key, object, found = k, o, true
		return errFound
	})
	if errors.Is(err, errFound) {
		err = nil
	}
	return key, object, found, err
}

var errFound = errors.New("it was found")

// Last returns the last object whose key begins with prefix, and whether it exists. The
// prefix ends below 0xff.
func (c Collection[T]) Last(tx *Tx, prefix string) (key string, object T, found bool, err error) {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return "", object, false, nil
	}
	cursor := bucket.Cursor()
	after := []byte(prefix)
	after[len(after)-1]++
	last := cursor.Last
	if beyond, _ := cursor.Seek(after); beyond != nil {
		last = cursor.Prev
	}
	k, v := last()
	if k == nil || !strings.HasPrefix(string(k), prefix) {
		return "", object, false, nil
	}
	err = c.decode(tx, string(k), v, &object)
	return string(k), object, err == nil, err
}

func (c Collection[T]) decode(tx *Tx, key string, v []byte, object *T) error {
	version, body, err := tx.split(v)
	if err == nil {
		err = json.Unmarshal(body, object)
	}
	if err != nil {
		return fmt.Errorf("read %s %s: %w", c, key, err)
	}
	setVersion(object, version)
	return nil
}

// Decode reads the object from before a deletion, as a Change has it.
func (c Collection[T]) Decode(key string, body []byte) (object T, err error) {
	if err := json.Unmarshal(body, &object); err != nil {
		return object, fmt.Errorf("read %s %s: %w", c, key, err)
	}
	return object, nil
}

// TimeKey is a key that sorts by a time, and then by another key.
func TimeKey(t time.Time, key string) string { return fmt.Sprintf("%020d/%s", t.UnixNano(), key) }
