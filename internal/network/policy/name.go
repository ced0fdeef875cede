package policy

import (
	"fmt"
	"strings"
)

// Name is a DNS name of a host: labels of letters, digits and dashes, in lower case,
// without a dot at the end.
type Name string

// Bounds of a name (RFC 1035 §2.3.4), without the dot at its end.
const (
	maxName  = 253
	maxLabel = 63
)

// ParseName reads a name. It refuses names that programs might read as an address.
func ParseName(text string) (Name, error) {
	name := strings.TrimSuffix(text, ".")
	if name == "" || len(name) > maxName {
		return "", fmt.Errorf("%s is not a name: it needs 1 to %d characters", quote(text), maxName)
	}
	labels := strings.Split(name, ".")
	for _, l := range labels {
		if err := checkLabel(l); err != nil {
			return "", fmt.Errorf("%s is not a name: %w", quote(text), err)
		}
	}
	if last := labels[len(labels)-1]; isNumber(last) {
		return "", fmt.Errorf("%s is neither a name nor an address: its last part is a number", quote(text))
	}
	return Name(strings.ToLower(name)), nil
}

func checkLabel(l string) error {
	if l == "" || len(l) > maxLabel {
		return fmt.Errorf("each part between dots needs 1 to %d characters", maxLabel)
	}
	for i := range len(l) {
		switch c := l[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case c == '-' && i > 0 && i < len(l)-1:
		case c >= 0x80:
			return fmt.Errorf("it has a character outside of ASCII: write its ASCII form (xn--...)")
		default:
			return fmt.Errorf("it has a %q where only letters and digits can be", c)
		}
	}
	return nil
}

// isNumber says whether a label is decimal or, after 0x, hexadecimal. Programs read
// a name that ends so as an IPv4 address (the URL standard, "ends in a number").
func isNumber(l string) bool {
	rest, hex := strings.CutPrefix(strings.ToLower(l), "0x")
	digits := "0123456789"
	if hex {
		digits += "abcdef"
	}
	return strings.Trim(rest, digits) == ""
}

// Below says whether the name is below another, at any depth.
func (n Name) Below(other Name) bool {
	head, ok := strings.CutSuffix(string(n), string(other))
	return ok && len(head) > 1 && head[len(head)-1] == '.'
}

// quote shows untrusted text in an error, shortened.
func quote(s string) string {
	const most = 80
	if len(s) > most {
		return fmt.Sprintf("%q...", s[:most])
	}
	return fmt.Sprintf("%q", s)
}
