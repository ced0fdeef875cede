package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// keptAnswer is the answer to a request that succeeded. The transaction that writes the
// request's object also writes the answer, so the journal has both or neither.
type keptAnswer struct {
	Body    string           `json:"body"`
	Time    time.Time        `json:"time"`
	Sandbox *sandbox.Sandbox `json:"sandbox,omitempty"`
	Fork    *sandbox.Fork    `json:"fork,omitempty"`

	Checkpoint *sandbox.CheckpointSize `json:"checkpoint,omitempty"`
}

// The collection's name is the one that existing journals have.
var answers = journal.Collection[keptAnswer]("outcomes")

// answersByTime has the keys of answers, the oldest first. A space and the
// answer's key in answersBySpace follow each.
var answersByTime = journal.Collection[string]("outcomes-by-time")

// answersBySpace has the answers of each namespace in the order in which they were made.
// They are forgotten in that order, so the first and the last tell how many there are.
var answersBySpace = journal.Collection[answerPlace]("outcomes-by-namespace")

// answerPlace is one entry of answersBySpace.
type answerPlace struct {
	Key   string    `json:"key"`
	Time  time.Time `json:"time"`
	Bytes int       `json:"bytes"`
	// Total is the number of bytes of this answer and all earlier ones.
	Total int64 `json:"total"`
}

// An answer is kept for keepAnswers, unless its namespace has made keptPerSpace answers or
// keptSpaceBytes of them since. Each new answer forgets at most forgetStep of the expired
// ones, and at most surplusStep of the surplus ones: one large answer can displace many small
// ones.
const (
	keepAnswers    = 24 * time.Hour
	keptPerSpace   = 10_000
	keptSpaceBytes = 16 << 20
	surplusStep    = 256
)

// Each returns the object in the answer to one kind of request.
func sandboxIn(a *keptAnswer) **sandbox.Sandbox           { return &a.Sandbox }
func forkIn(a *keptAnswer) **sandbox.Fork                 { return &a.Fork }
func checkpointIn(a *keptAnswer) **sandbox.CheckpointSize { return &a.Checkpoint }

// namespace is the namespace of the object in the answer.
func (a keptAnswer) namespace() sandbox.Namespace {
	switch {
	case a.Sandbox != nil:
		return a.Sandbox.Namespace
	case a.Fork != nil:
		return a.Fork.Namespace
	}
	return a.Checkpoint.Namespace
}

// keepAnswer keeps the answer to a request, and forgets some expired and surplus ones.
func keepAnswer(tx *journal.Tx, once sandbox.Once, a keptAnswer) error {
	a.Body, a.Time = once.Body, time.Now().UTC()
	body, err := json.Marshal(a)
	if err != nil {
		return err
	}
	if err := forgetOldAnswers(tx, a.Time.Add(1-keepAnswers)); err != nil {
		return err
	}
	space := string(a.namespace()) + "/"
	at, last, _, err := answersBySpace.Last(tx, space)
	if err != nil {
		return err
	}
	next := answerPlace{Key: once.Key, Time: a.Time, Bytes: len(body), Total: last.Total + int64(len(body))}
	place := space + fmt.Sprintf("%020d", placeNumber(at)+1)
	return errors.Join(
		answers.Put(tx, once.Key, a),
		answersByTime.Put(tx, journal.TimeKey(a.Time, once.Key), once.Key+" "+place),
		answersBySpace.Put(tx, place, next),
		forgetSurplus(tx, space, place, next.Total))
}

// placeNumber is the number in a key of answersBySpace. For an empty key it is 0.
func placeNumber(place string) uint64 {
	_, number, _ := strings.Cut(place, "/")
	n, _ := strconv.ParseUint(number, 10, 64)
	return n
}

// forgetOldAnswers forgets some answers from before a time.
func forgetOldAnswers(tx *journal.Tx, before time.Time) error {
	for range forgetStep {
		at, named, found, err := answersByTime.First(tx, "")
		if err != nil || !found || at >= journal.TimeKey(before, "") {
			return err
		}
		key, place, _ := strings.Cut(named, " ")
		if err := forgetAnswer(tx, at, key, place); err != nil {
			return err
		}
	}
	return nil
}

// forgetSurplus forgets some of the first answers of a namespace. last is the key of its
// last one.
func forgetSurplus(tx *journal.Tx, space, last string, total int64) error {
	for range surplusStep {
		place, first, found, err := answersBySpace.First(tx, space)
		if err != nil || !found || place == last {
			return err
		}
		if placeNumber(last)-placeNumber(place) < keptPerSpace && total-first.Total+int64(first.Bytes) <= keptSpaceBytes {
			return nil
		}
		if err := forgetAnswer(tx, journal.TimeKey(first.Time, first.Key), first.Key, place); err != nil {
			return err
		}
	}
	return nil
}

// forgetAnswer forgets the answer of a time. A later answer under the same key may have
// taken its place. An answer of an older daemon has no place.
func forgetAnswer(tx *journal.Tx, at, key, place string) error {
	a, found, err := answers.Get(tx, key)
	if err = errors.Join(err, answersByTime.Delete(tx, at)); err == nil && found && journal.TimeKey(a.Time, key) == at {
		err = answers.Delete(tx, key)
	}
	if place != "" {
		err = errors.Join(err, answersBySpace.Delete(tx, place))
	}
	return err
}
