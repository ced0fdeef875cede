package dns

import (
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	maxName  = 253 // RFC 1035 §2.3.4, without the final dot
	maxLabel = 63
)

// CanonicalName returns a host name in the form in which names are compared: lower
// case, no final dot. It accepts letters, digits, hyphens and underscores. It refuses
// names that read as an address.
func CanonicalName(name string) (string, error) {
	name = strings.TrimSuffix(name, ".")
	if name == "" || len(name) > maxName {
		return "", fmt.Errorf("name of %d bytes: %w", len(name), ErrName)
	}
	label := 0
	for i := range len(name) {
		switch c := name[i]; {
		case c == '.':
			if label == 0 {
				return "", fmt.Errorf("name %q has an empty label: %w", name, ErrName)
			}
			label = 0
			continue
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_':
		default:
			return "", fmt.Errorf("name %q has the byte %#x: %w", name, c, ErrName)
		}
		if label++; label > maxLabel {
			return "", fmt.Errorf("name %q has a label of more than %d bytes: %w", name, maxLabel, ErrName)
		}
	}
	if label == 0 {
		return "", fmt.Errorf("name %q ends in two dots: %w", name, ErrName)
	}
	if looksLikeAddress(name) {
		return "", fmt.Errorf("name %q is an address: %w", name, ErrName)
	}
	return strings.ToLower(name), nil
}

// looksLikeAddress is true for names that C libraries parse as an IPv4 address
// instead of resolving them: dotted quads, but also 2130706433, 0x7f.1 and
// 017700000001. The WHATWG URL standard decides by the last label: a number there
// makes the host an address.
func looksLikeAddress(name string) bool {
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	last := name[strings.LastIndexByte(name, '.')+1:]
	digits := strings.TrimLeft(last, "0123456789")
	if digits == "" {
		return true
	}
	if hex, ok := strings.CutPrefix(strings.ToLower(last), "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return false
}

// canonical is CanonicalName of a name in a message.
func canonical(name dnsmessage.Name) (string, error) {
	return CanonicalName(name.String())
}

// wireName returns a canonical name in the form of messages.
func wireName(name string) dnsmessage.Name {
	// A canonical name has at most 253 bytes, and NewName refuses only more than 255.
	n, _ := dnsmessage.NewName(name + ".")
	return n
}

// below reports whether name is domain or below it.
func below(name, domain string) bool {
	rest, ok := strings.CutSuffix(name, domain)
	return ok && (rest == "" || strings.HasSuffix(rest, "."))
}
