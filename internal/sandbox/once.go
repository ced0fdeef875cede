package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
)

// Once identifies a request that may be repeated but must be done only once.
type Once struct {
	Key  string // digest of the principal, the route and its key
	Body string // digest of the request's body
}

// NewOnce identifies the request of a principal to a route under a key of the
// principal's choice.
func NewOnce(principal, route, key string, body []byte) Once {
	return Once{Key: digest([]byte(fmt.Sprintf("%q %q %q", principal, route, key))), Body: digest(body)}
}

var digestText = regexp.MustCompile(`^[0-9a-f]{64}$`)

// ParseOnce checks an identity that another program has made.
func ParseOnce(key, body string) (Once, error) {
	if !digestText.MatchString(key) || !digestText.MatchString(body) {
		return Once{}, Errorf(CodeInvalid, "the identity of the request is not valid").
			Because("key and body are not 64 of the characters 0-9 and a-f each").Try("Send the SHA-256 of both, in hexadecimal")
	}
	return Once{Key: key, Body: body}, nil
}

// Of binds the identity to a principal and a route, so that identities which two
// principals chose never collide.
func (o Once) Of(principal, route string) Once {
	return Once{Key: digest([]byte(fmt.Sprintf("%q %q identity %q", principal, route, o.Key))), Body: o.Body}
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Check refuses a key that was used for another request.
func (o Once) Check(body string) error {
	if o.Body == body {
		return nil
	}
	return Errorf(CodeConflict, "the idempotency key was used for another request").
		Because("its body was different").Try("Use a new key for a new request")
}
