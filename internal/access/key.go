package access

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"slices"
	"strings"
	"time"

	"agentrun.dev/internal/sandbox"
)

// Keys look like ar_<id>_<secret>, tokens of sandboxes like ars_<id>_<secret>, so
// that people and scanners recognise them.
const (
	keyPrefix   = "ar_"
	tokenPrefix = "ars_"
	keyIDLength = 12
	secretBytes = 32
)

var text32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// random returns n random characters of five bits each.
func random(n int) string {
	b := make([]byte, (n*5+7)/8)
	_, _ = rand.Read(b) // never fails
	return text32.EncodeToString(b)[:n]
}

// secretLength is the length of a secret as text.
var secretLength = text32.EncodedLen(secretBytes)

// digest is the hash of a key's whole text; the key itself is not stored. The
// secret has 256 random bits, so a slower hash is not needed.
type digest [sha256.Size]byte

func digestOf(text string) digest { return sha256.Sum256([]byte(text)) }

// KeyID is the id of a key.
type KeyID string

// ParseKeyID checks a key's id.
func ParseKeyID(s string) (KeyID, error) {
	if len(s) != keyIDLength || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz234567") != "" {
		return "", sandbox.Errorf(sandbox.CodeInvalid, "this is not the id of a key").
			Because("it is not %d of the characters a-z and 2-7", keyIDLength).Try("`agentrun key list` shows the ids")
	}
	return KeyID(s), nil
}

// Key is an API key, without its secret.
type Key struct {
	ID         KeyID               `json:"id"`
	Name       string              `json:"name"`
	Role       Role                `json:"role"`
	Namespaces []sandbox.Namespace `json:"namespaces"`
	Created    time.Time           `json:"created"`
	// Expires is when the key becomes invalid; zero means never.
	Expires time.Time `json:"expires,omitzero"`
}

// KeySpec describes a new key.
type KeySpec struct {
	Name       string
	Role       Role
	Namespaces []sandbox.Namespace
	// Lifetime is how long the key is valid; 0 means for ever.
	Lifetime time.Duration
}

// ParseNamespaces checks the namespaces of a key. Unlike elsewhere, an empty
// name does not mean the default namespace.
func ParseNamespaces(list []string) ([]sandbox.Namespace, error) {
	out := make([]sandbox.Namespace, 0, len(list))
	for _, s := range list {
		n := AllNamespaces
		if s != string(AllNamespaces) {
			name, err := sandbox.ParseName(s)
			if err != nil {
				return nil, sandbox.Errorf(sandbox.CodeInvalid, "namespaces: %w", err)
			}
			n = sandbox.Namespace(name)
		}
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out, nil
}

// Bounds of keys.
const (
	maxKeys       = 1000
	maxNamespaces = 64
)

// complete checks a spec, and fills in the namespaces of an admin if they are
// left out.
func (s KeySpec) complete() (KeySpec, error) {
	if _, err := sandbox.ParseName(s.Name); err != nil {
		return s, err
	}
	var err error
	if s.Namespaces, err = checkGrant(s.Role, s.Namespaces); err != nil {
		return s, err
	}
	if s.Lifetime < 0 {
		return s, sandbox.Errorf(sandbox.CodeInvalid, "lifetime: it is negative")
	}
	return s, nil
}

// checkGrant checks the role of a person or a program and its namespaces, and fills
// in those of an admin.
func checkGrant(role Role, in []sandbox.Namespace) ([]sandbox.Namespace, error) {
	switch role {
	case RoleAdmin:
		if len(in) == 0 {
			in = []sandbox.Namespace{AllNamespaces}
		}
		// An admin makes keys: with only some namespaces, it could give itself
		// the rest.
		if !slices.Equal(in, []sandbox.Namespace{AllNamespaces}) {
			return in, sandbox.Errorf(sandbox.CodeInvalid, "namespaces: an admin is for all of them").Try("Leave them out, or use the role user")
		}
	case RoleUser, RoleViewer:
		if len(in) == 0 {
			return in, sandbox.Errorf(sandbox.CodeInvalid, "namespaces: for none of them it may nothing").Try("Name them, or write * for all")
		}
	default:
		return in, sandbox.Errorf(sandbox.CodeInvalid, "role: it is none of %s, %s and %s", RoleAdmin, RoleUser, RoleViewer)
	}
	if len(in) > maxNamespaces {
		return in, sandbox.Errorf(sandbox.CodeInvalid, "namespaces: %d are more than %d", len(in), maxNamespaces).Try("Write * for all")
	}
	return in, nil
}
