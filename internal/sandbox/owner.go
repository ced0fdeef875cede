package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"time"
)

// UID identifies an owner, an object of a controller, for ever.
type UID string

var uidText = regexp.MustCompile(`^[A-Za-z0-9-]{1,64}$`)

// ParseUID checks the UID of an owner.
func ParseUID(s string) (UID, error) {
	if !uidText.MatchString(s) {
		return "", Errorf(CodeInvalid, "the owner %s is not valid", Quote(s)).Because("it is not 1 to 64 letters, digits and dashes")
	}
	return UID(s), nil
}

// TokenHash is the SHA-256 of a token, in hexadecimal. If the node has not made a sandbox's
// token, it knows only this.
type TokenHash string

var tokenHashText = regexp.MustCompile(`^[0-9a-f]{64}$`)

// ParseTokenHash checks a hash.
func ParseTokenHash(s string) (TokenHash, error) {
	if !tokenHashText.MatchString(s) { // not shown: it may be the token itself
		return "", Errorf(CodeInvalid, "the hash of the token is not valid").Because("it is not 64 of the characters 0-9 and a-f").
			Try("Send the SHA-256 of the token, in hexadecimal")
	}
	return TokenHash(s), nil
}

// HashToken returns the hash of a token.
func HashToken(token string) TokenHash {
	sum := sha256.Sum256([]byte(token))
	return TokenHash(hex.EncodeToString(sum[:]))
}

// Token is the content of a request's token: the id of a sandbox, if the node derives the
// token from it, and otherwise the token's hash.
type Token struct {
	Derived ID
	Hash    TokenHash
}

// Precondition says which object a call is for. Each field that is set must equal that of
// the object.
type Precondition struct {
	// ID is the id of a sandbox or a checkpoint.
	ID    ID
	Owner UID
	// Version is the resource version.
	Version uint64
}

// Identity has the fields of an object that preconditions are compared with.
type Identity struct {
	Kind Kind
	Key
	ID      ID
	Owner   UID
	Version uint64
}

// Meets refuses a call whose preconditions the object does not meet.
func (o Identity) Meets(when ...Precondition) error {
	refuse := func(format string, a ...any) error {
		return Errorf(CodeConflict, "%s %s is not the one that the call is for", o.Kind, o.Name).Because(format, a...).
			Try("Look at it again")
	}
	for _, p := range when {
		switch {
		case p.ID != "" && p.ID != o.ID:
			return refuse("its id is %s, not %s", o.ID, p.ID)
		case p.Owner != "" && p.Owner != o.Owner && o.Owner == "":
			return refuse("it has no owner")
		case p.Owner != "" && p.Owner != o.Owner:
			return refuse("its owner is %s, not %s", o.Owner, p.Owner)
		case p.Version != 0 && p.Version != o.Version:
			return refuse("its resource version is %d, not %d", o.Version, p.Version)
		}
	}
	return nil
}

// Identity returns that of a sandbox.
func (s Sandbox) Identity() Identity {
	return Identity{Kind: KindSandbox, Key: s.Key, ID: s.ID, Owner: s.Owner, Version: s.ResourceVersion}
}

type mayOwnKey struct{}

// WithOwning says that the principal of the request may set owners, and change
// objects that have one.
func WithOwning(ctx context.Context) context.Context {
	return context.WithValue(ctx, mayOwnKey{}, true)
}

// MayOwn reports whether the principal of the request may set owners, and
// change objects that have one.
func MayOwn(ctx context.Context) bool {
	may, _ := ctx.Value(mayOwnKey{}).(bool)
	return may
}

// MayChange refuses to change or delete an object that has an owner, unless MayOwn.
func MayChange(ctx context.Context, o Identity) error {
	if o.Owner == "" || MayOwn(ctx) {
		return nil
	}
	return Errorf(CodeDenied, "%s %s is not yours to change", o.Kind, o.Name).
		Because("its owner is %s, the object of a controller", o.Owner).
		Try("Change that object, or ask those who run the controller")
}

// MayGive refuses to set an owner, unless MayOwn.
func MayGive(ctx context.Context, owner UID) error {
	if owner == "" || MayOwn(ctx) {
		return nil
	}
	return Errorf(CodeDenied, "an owner is not yours to give").Because("only controllers do").
		Try("Leave the owner out, or call with the certificate of a controller")
}

// CheckExpiry refuses an end time that has passed, or that cannot be written. The zero time is
// no end.
func CheckExpiry(at, now time.Time) error {
	if at.UTC().Year() > 9999 { // it was given with an offset
		return Invalid("expires", "it is no time of the years 1 to 9999 in UTC")
	}
	if at.IsZero() || now.Before(at) {
		return nil
	}
	return Invalid("expires", "%s has passed", at.UTC().Format(time.RFC3339))
}

// ReleaseRequest asks to forget an owner whose sandbox has ended.
type ReleaseRequest struct {
	Namespace Namespace
	Owner     UID
}
