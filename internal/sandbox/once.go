package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

// Once identifies a request that may come more than once and is to be done once.
type Once struct {
	Key  string // digest of whose and which request it is
	Body string // digest of what it asks for
}

// NewOnce identifies the request of a principal to a route under a key of the
// principal's choice.
func NewOnce(principal, route, key string, body []byte) Once {
	return Once{Key: digest([]byte(fmt.Sprintf("%q %q %q", principal, route, key))), Body: digest(body)}
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Check refuses a key that was used for something else.
func (o Once) Check(body string) error {
	if o.Body == body {
		return nil
	}
	return Errorf(CodeConflict, "the idempotency key was used for another request").
		Because("its body was different").Try("Use a new key for a new request")
}
