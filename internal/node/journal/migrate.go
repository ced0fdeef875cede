package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"time"

	"go.etcd.io/bbolt"
)

// migrations[n] brings the schema from n+1 to n+2.
var migrations = []func(*Tx) error{
	// Sandboxes say which secrets they hold, and there are quotas. A build of
	// AgentRun that does not know them would write secrets to disk in the
	// clear.
	func(*Tx) error { return nil },
	indexEnds,
	addVersions,
	// Sandboxes have owners, tokens that the node has not derived, and values of secrets
	// that came with the claim. A build of AgentRun that does not know them would accept
	// the derived tokens, and write those values to disk in the clear.
	func(*Tx) error { return nil },
}

// indexEnds moves sandboxes that have ended to a collection of their own, by namespace,
// name and id, and lists answers by their time.
func indexEnds(tx *Tx) error {
	type head struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
		ID        string `json:"id"`
		State     string `json:"state"`
	}
	const sandboxes, ended = "sandboxes", "ended"
	moved := map[string]string{}
	err := Collection[head](sandboxes).Each(tx, "", func(key string, s head) error {
		if s.State == "Ended" {
			moved[key] = s.Namespace + "/" + s.Name + "/" + s.ID
		}
		return nil
	})
	for from, to := range moved {
		record, _, getErr := Collection[json.RawMessage](sandboxes).Get(tx, from)
		err = errors.Join(err, getErr, Collection[json.RawMessage](ended).Put(tx, to, record), Collection[json.RawMessage](sandboxes).Delete(tx, from))
	}
	type answer struct {
		Time time.Time `json:"time"`
	}
	return errors.Join(err, Collection[answer]("outcomes").Each(tx, "", func(key string, a answer) error {
		return Collection[string]("outcomes-by-time").Put(tx, TimeKey(a.Time, key), key)
	}))
}

// addVersions gives all objects the first resource version: the order in which they
// were written is unknown.
func addVersions(tx *Tx) error {
	first := tx.take()
	err := tx.bolt.ForEach(func(name []byte, bucket *bbolt.Bucket) error {
		if bytes.Equal(name, metaBucket) {
			return nil
		}
		var all []entry
		if err := bucket.ForEach(func(k, v []byte) error {
			all = append(all, entry{key: string(k), value: withVersion(first, v)})
			return nil
		}); err != nil {
			return err
		}
		for _, e := range all { // a bucket is not changed while it is read
			if err := bucket.Put([]byte(e.key), e.value); err != nil {
				return err
			}
		}
		return nil
	})
	_, putErr := putVersion(tx.bolt, first)
	return errors.Join(err, putErr)
}
