package policy

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestParseRule: rules and their canonical forms.
func TestParseRule(t *testing.T) {
	label := strings.Repeat("a", maxLabel)
	longest := strings.Join([]string{label, label, label, strings.Repeat("b", 61)}, ".")
	for text, want := range map[string]string{
		"api.openai.com:443":                "api.openai.com:443",
		"API.OpenAI.com.:443":               "api.openai.com:443",
		"*.Example.org":                     "*.example.org",
		"*.example.org.:443":                "*.example.org:443",
		"tcp://github.com:22":               "tcp://github.com:22",
		"UDP://203.0.113.7:123":             "udp://203.0.113.7:123",
		"10.1.0.0/16:5432":                  "10.1.0.0/16:5432",
		"10.1.0.0/16":                       "10.1.0.0/16",
		"10.1.2.3/32":                       "10.1.2.3",
		"0.0.0.0/0":                         "0.0.0.0/0",
		"2001:db8::1":                       "2001:db8::1",
		"[2001:DB8::1]":                     "2001:db8::1",
		"[2001:db8::1]:443":                 "[2001:db8::1]:443",
		"2001:db8::/32":                     "2001:db8::/32",
		"[2001:db8::/32]:443":               "[2001:db8::/32]:443",
		"[2001:db8::/128]:443":              "[2001:db8::]:443",
		"udp://[::1]:53":                    "udp://[::1]:53",
		"::/0":                              "::/0",
		"localhost":                         "localhost",
		"xn--bcher-kva.example":             "xn--bcher-kva.example",
		"r3---sn-4g5e.example":              "r3---sn-4g5e.example",
		"1password.com":                     "1password.com",
		"3.example.org:65535":               "3.example.org:65535",
		"udp://*." + longest[2:] + ":65535": "udp://*." + longest[2:] + ":65535",
	} {
		r, err := ParseRule(text)
		if err != nil || r.String() != want {
			t.Errorf("%q is %q, %v; want %q", text, r, err, want)
			continue
		}
		if again, err := ParseRule(want); again != r {
			t.Errorf("%q is read back as %+v, %v; it was %+v", want, again, err, r)
		}
	}
}

func TestParseRuleRefuses(t *testing.T) {
	for text, say := range map[string]string{
		"":                        "1 to 253",
		".":                       "1 to 253",
		"example.org..":           "between dots",
		"*":                       "egress: allow",
		"*:443":                   "egress: allow",
		"*.":                      "1 to 253",
		"a*.example.org":          "whole first part",
		"*.*.example.org":         "where only letters",
		"foo.*.org":               "whole first part",
		"bücher.example":          "xn--",
		"a_b.example.org":         `'_'`,
		"-a.example.org":          `'-'`,
		"a-.example.org":          `'-'`,
		"a..example.org":          "between dots",
		"exa mple.org":            `' '`,
		"example.org\x00":         `'\x00'`,
		" example.org":            `' '`,
		"https://example.org":     "tcp:// or udp://",
		"://example.org":          "tcp:// or udp://",
		"tcp://udp://a.example":   "not a port",
		"example.org/path":        "not a range",
		"example.org:":            "port after the colon is missing",
		"example.org:0":           "not a port",
		"example.org:65536":       "not a port",
		"example.org:080":         "not a port",
		"example.org:+80":         "not a port",
		"example.org:http":        "not a port",
		"user@example.org":        `'@'`,
		"1.2.3":                   "number",
		"1.2.3.4.5":               "number",
		"2130706433":              "number",
		"0x7f.1":                  "number",
		"foo.0x7f":                "number",
		"010.0.0.1":               "number",
		"10.1.2.3/16":             "write 10.1.0.0/16",
		"10.1.0.0/33":             "not a range",
		"::ffff:10.0.0.1":         "write 10.0.0.1",
		"fe80::1%eth0":            "zone",
		"[fe80::1%eth0]:80":       "zone",
		"[10.0.0.1]:80":           "only IPv6",
		"[example.org]:80":        "only IPv6",
		"[2001:db8::1":            "] is missing",
		"[2001:db8::1]443":        "only a port",
		"[2001:db8::]/32:443":     "only a port",
		"[2001:db8::1]:":          "only a port",
		"2001:db8::/32:443":       "in brackets",
		"2001:db8::1::443":        "not an address",
		strings.Repeat("a", 64):   "between dots",
		strings.Repeat("a.", 130): "1 to 253",
		strings.Repeat("a", 4096): "more than 280",
	} {
		r, err := ParseRule(text)
		if err == nil {
			t.Errorf("%q is taken, as %q", text, r)
		} else if !strings.Contains(err.Error(), say) {
			t.Errorf("%q: %v; want an error with %q", text, err, say)
		}
	}
}

// FuzzRule: an accepted rule has one canonical form, which is read as the same rule,
// in text and in JSON.
func FuzzRule(f *testing.F) {
	for _, s := range []string{"api.openai.com:443", "*.example.org", "10.1.0.0/16:5432", "udp://203.0.113.7:123", "[2001:db8::/32]:443", "2001:db8::1", "tcp://a", "::/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRule(text)
		if err != nil {
			if r != (Rule{}) {
				t.Fatalf("%q: %v, and a rule %+v", text, err, r)
			}
			return
		}
		again, err := ParseRule(r.String())
		if err != nil || again != r || again.String() != r.String() {
			t.Fatalf("%q is %q, and read back %q, %v", text, r, again, err)
		}
		p := Policy{Egress: AllowByDefault, Allow: []Rule{r}, Deny: []Rule{r, r}}
		b, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var back Policy
		if err := json.Unmarshal(b, &back); err != nil || !back.Equal(p) || p.Validate() != nil {
			t.Fatalf("%s is read back as %+v: %v", b, back, err)
		}
	})
}

func TestParse(t *testing.T) {
	p, err := Parse("", []string{"a.example:443"}, []string{"evil.example"})
	if err != nil || p.Egress != DenyByDefault {
		t.Fatalf("%+v, %v", p, err)
	}
	b, err := json.Marshal(p)
	if want := `{"egress":"deny","allow":["a.example:443"],"deny":["evil.example"]}`; err != nil || string(b) != want {
		t.Errorf("%s, %v; want %s", b, err, want)
	}
	if b, err := json.Marshal(Policy{}); err != nil || string(b) != `{"egress":"deny"}` {
		t.Errorf("the zero policy is %s, %v", b, err)
	}
	many := make([]string, MaxRules+1)
	for i := range many {
		many[i] = "a.example"
	}
	for name, c := range map[string]struct {
		egress      string
		allow, deny []string
		say         string
	}{
		"egress":     {egress: "all", say: "egress: \"all\" is neither"},
		"allow":      {allow: []string{"a.example", "!"}, say: "allow[1]"},
		"deny":       {deny: []string{"!"}, say: "deny[0]"},
		"many allow": {allow: many, say: "allow: 257 rules"},
		"many deny":  {deny: many, say: "deny: 257 rules"},
	} {
		if _, err := Parse(c.egress, c.allow, c.deny); err == nil || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%s: %v; want %q", name, err, c.say)
		}
	}
	for _, bad := range []string{`{"egress":"open"}`, `{"egres":"deny"}`, `{"allow":["!"]}`, `{"allow":[1]}`, `[]`, `{"egress":"deny","except":[]}`} {
		if err := json.Unmarshal([]byte(bad), new(Policy)); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
	for name, p := range map[string]Policy{"egress": {Egress: "open"}, "empty rule": {Allow: []Rule{{}}}, "many": {Deny: make([]Rule, MaxRules+1)}} {
		if p.Validate() == nil {
			t.Errorf("%s is valid", name)
		}
	}
}
