package bench

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// TestLoad: clients run their loads, and report when they begin.
func TestLoad(t *testing.T) {
	s, err := newLoadServer(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	}()
	for _, l := range []load{
		{What: loadUp, Connections: 1, For: 10 * time.Millisecond},
		{What: loadDown, Connections: 1, For: 10 * time.Millisecond},
		{What: loadUp, Connections: 20, For: 10 * time.Millisecond},
		{What: loadDown, Connections: 20, For: 10 * time.Millisecond},
		{What: loadEcho, Count: 5},
		{What: loadConnect, Count: 5},
	} {
		l.Server = s.address()
		argument, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := ServeLoad(t.Context(), string(argument), &out); err != nil {
			t.Fatal(err)
		}
		begun := 0
		r, err := readLoaded(&out, func() error { begun++; return nil })
		switch moves := l.Connections > 0; {
		case err != nil:
			t.Errorf("%s: %v", l.What, err)
		case begun != 1:
			t.Errorf("%s has begun %d times", l.What, begun)
		case moves && (r.Bytes < loadBuffer || r.Took < l.For):
			t.Errorf("%s: %d bytes in %v", l.What, r.Bytes, r.Took)
		case len(r.Samples) != l.Count:
			t.Errorf("%s: %d samples of %d", l.What, len(r.Samples), l.Count)
		}
	}
}

// TestLoadFails: a client that cannot run its load says why.
func TestLoadFails(t *testing.T) {
	for argument, want := range map[string]string{
		`{"server": "127.0.0.1:1", "what": "up", "connections": 1}`: "connection refused",
		`{"server": "127.0.0.1:1", "what": "swim"}`:                 "not a load",
	} {
		var out bytes.Buffer
		if err := ServeLoad(t.Context(), argument, &out); err != nil {
			t.Fatal(err)
		}
		if _, err := readLoaded(&out, func() error { return nil }); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", argument, err)
		}
	}
	if err := ServeLoad(t.Context(), "{", &bytes.Buffer{}); err == nil {
		t.Error("half an argument was accepted")
	}
	for _, said := range []string{"", "begin\n", "begin\nbegin\n", "hello\n"} {
		if _, err := readLoaded(strings.NewReader(said), func() error { return nil }); err == nil {
			t.Errorf("%q is a result", said)
		}
	}
}

func TestParseStat(t *testing.T) {
	own, waited, err := parseStat([]byte("7 (a ) b) S 1 7 7 0 -1 4194304 9 9 9 9 100 20 3 4 20 0 1 0 5 6 7"))
	if err != nil || own != 1200*time.Millisecond || waited != 70*time.Millisecond {
		t.Errorf("%v and %v, %v", own, waited, err)
	}
	for _, bad := range []string{"", "7 (a) S 1", "7 (a) S 1 7 7 0 -1 4194304 9 9 9 9 x 20 3 4"} {
		if _, _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestSpread(t *testing.T) {
	given := []float64{3, 1, 2}
	if got, want := SpreadOf(given), (Spread{Min: 1, P50: 2, Max: 3}); got != want || given[0] != 3 {
		t.Errorf("%+v, not %+v; given %v", got, want, given)
	}
	if got := SpreadOf(nil); got != (Spread{}) {
		t.Errorf("of nothing: %+v", got)
	}
}
