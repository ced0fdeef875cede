package sandbox

import (
	"strings"
	"testing"
)

// TestIDs: ids with and without codes are valid, tell their codes, fit into a host name beside a
// port, and none is a prefix of another form.
func TestIDs(t *testing.T) {
	for _, c := range []struct{ cluster, node string }{{"", ""}, {"c", "n"}, {"prod1", "node7"}, {"abcdefg", "abcdefghijkl"}, {"10", "100"}} {
		codes, err := ParseCodes(c.cluster, c.node)
		if err != nil {
			t.Fatal(err)
		}
		id := codes.NewID()
		got, found := id.Codes()
		if _, err := ParseID(string(id)); err != nil || got != codes || found != (c.cluster != "") || len(id) > 50 || id == codes.NewID() {
			t.Errorf("%s has %+v, %t; %v", id, got, found, err)
		}
		if found && (len(id) != codesLength+randomLength || strings.Trim(string(id[:1]), idAlphabet) == "") {
			t.Errorf("%s could begin as another", id)
		}
	}
}

// TestCodesThatAreNone are refused.
func TestCodesThatAreNone(t *testing.T) {
	for _, c := range []struct{ cluster, node string }{
		{"c", ""}, {"", "n"}, {"0c", "n"}, {"c", "0n"}, {"C", "n"}, {"c", "n-1"}, {"abcdefgh", "n"}, {"c", "abcdefghijklm"}, {"c\n", "n"}, {"é", "n"},
	} {
		if _, err := ParseCodes(c.cluster, c.node); !HasCode(err, CodeInvalid) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	good := string(Codes{"c", "n"}.NewID())
	for _, id := range []string{
		"", good[1:], good + "a", "1" + good[1:], strings.Repeat("0", 20) + good[20:], strings.ToUpper(good), good[:39] + "1",
		good[:20], strings.Repeat("a", 40), "0000000" + good[7:8] + strings.Repeat("0", 12) + good[20:], "../" + good[3:],
	} {
		if _, err := ParseID(id); !HasCode(err, CodeInvalid) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// FuzzParseID: an id is valid without any conversion. It has one of two lengths, and its
// characters are safe in paths and host names.
func FuzzParseID(f *testing.F) {
	f.Add(string(NewID()))
	f.Add(string(Codes{"c1", "n1"}.NewID()))
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseID(s)
		if err != nil {
			return
		}
		if string(id) != s || len(s) != randomLength && len(s) != codesLength+randomLength || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
			t.Errorf("%q", s)
		}
		if codes, found := id.Codes(); found != (len(s) > randomLength) || found && !strings.HasPrefix(string(codes.NewID()), s[:codesLength]) {
			t.Errorf("%q has the codes %+v", s, codes)
		}
	})
}
