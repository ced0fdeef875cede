package journal

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

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
	return tx.put(bucket, entry{string(c), key, v})
}

// Delete removes the object under key, if there is one.
func (c Collection[T]) Delete(tx *Tx, key string) error {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return nil
	}
	return tx.delete(bucket, entry{bucket: string(c), key: key})
}

// Size is how many bytes the object under key takes, 0 if there is none.
func (c Collection[T]) Size(tx *Tx, key string) int {
	bucket := tx.bolt.Bucket([]byte(c))
	if bucket == nil {
		return 0
	}
	return len(bucket.Get([]byte(key)))
}

// Each calls f with the objects whose keys begin with prefix, in the order of
// their keys. f may not write to the collection.
func (c Collection[T]) Each(tx *Tx, prefix string, f func(key string, object T) error) error {
	return c.EachAfter(tx, prefix, "", f)
}

// EachAfter is Each from the first key on that comes after prefix+after. What comes
// before is not read.
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

// TimeKey is a key that sorts by a time, and then by another key.
func TimeKey(t time.Time, key string) string { return fmt.Sprintf("%020d/%s", t.UnixNano(), key) }
