package sandbox

import (
	"fmt"
	"regexp"
	"strings"
)

// Name is the name of an object within its namespace: a DNS label, because it
// becomes a host name.
type Name string

// Namespace separates objects of different owners. It is a DNS label, too.
type Namespace string

// DefaultNamespace is used if no namespace is given.
const DefaultNamespace Namespace = "default"

var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

const labelRule = "1 to 63 lower-case letters, digits and dashes, beginning and ending with a letter or digit"

// ParseName checks a name.
func ParseName(s string) (Name, error) {
	if !label.MatchString(s) {
		return "", Errorf(CodeInvalid, "the name %s is not valid", Quote(s)).Because("it is not %s", labelRule)
	}
	return Name(s), nil
}

// maxBase leaves room for the suffix that NewName or a fork adds to a name.
const maxBase = 48

// NewName makes a random name that begins with base.
func NewName(base Name) Name {
	cut := strings.TrimRight(string(base[:min(len(base), maxBase)]), "-")
	return Name(cut + "-" + string(NewID()[:6]))
}

// ParseNamespace checks a namespace. An empty one is the default.
func ParseNamespace(s string) (Namespace, error) {
	if s == "" {
		return DefaultNamespace, nil
	}
	if !label.MatchString(s) {
		return "", Errorf(CodeInvalid, "the namespace %s is not valid", Quote(s)).Because("it is not %s", labelRule)
	}
	return Namespace(s), nil
}

// ParseKey checks the name of an object and its namespace.
func ParseKey(namespace, name string) (Key, error) {
	n, err := ParseNamespace(namespace)
	if err != nil {
		return Key{}, err
	}
	label, err := ParseName(name)
	return Key{Namespace: n, Name: label}, err
}

// Quote shows untrusted text in an error, shortened.
func Quote(s string) string {
	const most = 80
	if len(s) > most {
		return fmt.Sprintf("%q...", s[:most])
	}
	return fmt.Sprintf("%q", s)
}

// Key names an object of one kind.
type Key struct {
	Namespace Namespace `json:"namespace"`
	Name      Name      `json:"name"`
}

func (k Key) String() string { return string(k.Namespace) + "/" + string(k.Name) }
