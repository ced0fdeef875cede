package sandbox

import (
	"crypto/rand"
	"encoding/base32"
	"regexp"
	"strings"
)

// ID identifies a sandbox or a machine, for ever. It has one of two forms: 20 random
// characters, or codes followed by 20 random characters. Each form has one length. Codes begin
// with a character that random characters never include, so no id is a prefix of another.
type ID string

const (
	randomLength  = 20
	clusterLength = 7
	nodeLength    = 12
	codesLength   = 1 + clusterLength + nodeLength

	idAlphabet = "abcdefghijklmnopqrstuvwxyz234567"
	// codePad pads codes on the left. No code begins with it.
	codePad = "0"
)

var idText = base32.NewEncoding(idAlphabet).WithPadding(base32.NoPadding)

// NewID makes a random id of 100 bits.
func NewID() ID {
	var b [13]byte
	_, _ = rand.Read(b[:]) // never fails
	return ID(idText.EncodeToString(b[:])[:randomLength])
}

// ParseID checks an id.
func ParseID(s string) (ID, error) {
	codes, made := "", s
	if len(s) == codesLength+randomLength {
		codes, made = s[:codesLength], s[codesLength:]
	}
	_, coded := parseCodes(codes)
	if len(made) != randomLength || strings.Trim(made, idAlphabet) != "" || codes != "" && !coded {
		return "", Errorf(CodeInvalid, "the id %s is not valid", Quote(s)).
			Because("it is not %d of the characters a-z and 2-7, nor these behind %d of codes", randomLength, codesLength)
	}
	return ID(s), nil
}

// Codes say where a sandbox was made. They are only a hint where to look for it, because a
// sandbox that moves keeps its id. The zero value means that an id has no codes.
type Codes struct{ Cluster, Node string }

var (
	clusterCode = regexp.MustCompile(`^[a-z1-9][a-z0-9]{0,6}$`)
	nodeCode    = regexp.MustCompile(`^[a-z1-9][a-z0-9]{0,11}$`)
)

// ParseCodes checks the codes of a cluster and of a node in it. Either both are empty or
// both are set.
func ParseCodes(cluster, node string) (Codes, error) {
	switch {
	case cluster == "" && node == "":
		return Codes{}, nil
	case !clusterCode.MatchString(cluster):
		return Codes{}, Errorf(CodeInvalid, "the cluster code %s is not valid", Quote(cluster)).
			Because("it is not 1 to %d of the characters a-z and 0-9, not beginning with 0", clusterLength)
	case !nodeCode.MatchString(node):
		return Codes{}, Errorf(CodeInvalid, "the node code %s is not valid", Quote(node)).
			Because("it is not 1 to %d of the characters a-z and 0-9, not beginning with 0", nodeLength)
	}
	return Codes{cluster, node}, nil
}

// NewID makes a random id with the codes.
func (c Codes) NewID() ID {
	if c == (Codes{}) {
		return NewID()
	}
	pad := func(code string, length int) string { return strings.Repeat(codePad, length-len(code)) + code }
	return ID(codePad+pad(c.Cluster, clusterLength)+pad(c.Node, nodeLength)) + NewID()
}

// Codes returns the codes of an id, if it has any.
func (id ID) Codes() (c Codes, found bool) {
	if len(id) != codesLength+randomLength {
		return c, false
	}
	return parseCodes(string(id[:codesLength]))
}

func parseCodes(s string) (Codes, bool) {
	if len(s) != codesLength || s[:1] != codePad {
		return Codes{}, false
	}
	c, err := ParseCodes(strings.TrimLeft(s[1:1+clusterLength], codePad), strings.TrimLeft(s[1+clusterLength:], codePad))
	return c, err == nil && c != Codes{}
}
