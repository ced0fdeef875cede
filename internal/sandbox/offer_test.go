package sandbox

import (
	"bytes"
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

func builtForOffer() Built {
	return Built{
		Image: "sha256:" + strings.Repeat("a", 64), Env: Env{"PATH": "/bin"}, Workdir: "/workspace", User: "1000:1000", TrustedCA: strings.Repeat("b", 64),
		Lineage: &Lineage{Connections: []Connection{{Inside: netip.MustParseAddrPort("10.0.2.15:5000"), Outside: netip.MustParseAddrPort("192.0.2.1:443")}}},
	}
}

// TestParseBuilt: the result of a build arrives unchanged at another node, but without the size
// of the pulled image. Anything else is refused.
func TestParseBuilt(t *testing.T) {
	want := builtForOffer()
	with := want
	with.Pulled = 5
	text, err := EncodeBuilt(with)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseBuilt(text)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for name, bad := range map[string]string{
		"nothing":           "",
		"a list":            "[]",
		"another version":   `{"image":"x","workdir":"/w","future":1}`,
		"something follows": string(text) + "{}",
		"no image":          `{"workdir":"/w"}`,
		"a relative folder": `{"image":"x","workdir":"w"}`,
		"no folder":         `{"image":"x"}`,
		"a name with =":     `{"image":"x","workdir":"/w","env":{"A=B":"c"}}`,
		"a line":            `{"image":"x\ny","workdir":"/w"}`,
		"an address":        `{"image":"x","workdir":"/w","lineage":{"connections":[{"inside":"nowhere"}]}}`,
		"pulled":            `{"image":"x","workdir":"/w","pulled":1}`,
		"too long":          `{"image":"x","workdir":"/` + strings.Repeat("w", maxOffered) + `"}`,
	} {
		if got, err := ParseBuilt([]byte(bad)); !HasCode(err, CodeInvalid) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// FuzzBuilt: a text that is accepted from another node encodes to a text that
// is accepted, too, and stays the same.
func FuzzBuilt(f *testing.F) {
	text, err := EncodeBuilt(builtForOffer())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"image":"x","workdir":"/w","env":{"A":"b"}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := ParseBuilt(in)
		if err != nil {
			return
		}
		again, err := EncodeBuilt(got)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := ParseBuilt(again); err != nil {
			t.Errorf("%s became %s: %v", in, again, err)
		} else if text, _ := EncodeBuilt(back); !bytes.Equal(text, again) {
			t.Errorf("%s became %s", again, text)
		}
	})
}
