package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

func TestCompare(t *testing.T) {
	dir := t.TempDir()
	write := func(name, side string, n int, floor, fork, pages float64) {
		t.Helper()
		report := fmt.Sprintf(`{"engine":"x","floor":{"n":9,"p50_ms":%g},"first":{"n":9,"p50_ms":%g},"unused":{"n":0,"p50_ms":0},
			"memory":{"guest_bytes":%g},"noisy":false}`, floor, fork, pages)
		path := filepath.Join(dir, fmt.Sprintf("%s.%s.%d.json", name, side, n))
		if err := os.WriteFile(path, []byte(report), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// The machine became twice as slow; in floors nothing changed. Memory grew.
	for i, floor := range []float64{1, 2, 4} {
		write("fork", "before", i, floor, 10*floor, 100)
		write("fork", "after", i, 2*floor, 20*floor, 150)
	}
	var out bytes.Buffer
	if err := run([]string{dir}, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`(?m)first \(floors\) +10 +10 +10 +10 +10 +10 +1.00 +within the spread$`,
		`(?m)floor \(ms\) +2 +1 +4 +4 +2 +8 +2.00 +within the spread$`,
		`(?m)memory.guest_bytes +100 +100 +100 +150 +150 +150 +1.50 +MORE$`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no line %s in\n%s", want, out.String())
		}
	}
	if regexp.MustCompile(`unused`).MatchString(out.String()) {
		t.Error("an empty sample is compared")
	}
}

func TestCompareRefuses(t *testing.T) {
	dir := t.TempDir()
	if err := run([]string{dir}, &bytes.Buffer{}); err == nil {
		t.Error("an empty folder is accepted")
	}
	if err := os.WriteFile(filepath.Join(dir, "fork.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run([]string{dir}, &bytes.Buffer{}); err == nil {
		t.Error("a report of neither side is accepted")
	}
	if err := run(nil, &bytes.Buffer{}); err == nil {
		t.Error("no folder is accepted")
	}
}
