package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeModule makes a Go module to run tests of.
func writeModule(t *testing.T, files map[string]string) {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module example\n\ngo 1.26\n"
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
}

const good = `package a
import "testing"
func TestGood(t *testing.T) { t.Run("one", func(*testing.T) {}); t.Run("two", func(*testing.T) {}) }
`

func TestRun(t *testing.T) {
	for _, test := range []struct {
		name   string
		files  map[string]string
		args   []string
		err    string // substring; empty: the run passes
		output []string
		absent string // from the output, unless empty
	}{
		{
			name: "passes", files: map[string]string{"a/a_test.go": good, "b/b.go": "package b\n"},
			output: []string{"ok    example/a", "2 tests", "-     example/b", "2 passed, 0 failed, 0 skipped"},
		},
		{
			name: "fails", files: map[string]string{"a/a_test.go": good, "b/b_test.go": `package b
import "testing"
func TestBad(t *testing.T) { t.Log("a quiet word"); t.Error("a loud word") }
`},
			err: "1 tests failed", output: []string{"FAIL  example/b TestBad", "a quiet word", "a loud word", "2 passed, 1 failed, 0 skipped"},
		},
		{
			name: "skips", files: map[string]string{"a/a_test.go": `package a
import "testing"
func TestIdle(t *testing.T) { t.Skip("no such hardware") }
`},
			err: "1 tests were skipped without leave", output: []string{"SKIP  example/a TestIdle: not allowed", "no such hardware", "0 passed, 0 failed, 1 skipped"},
		},
		{
			name: "skips with leave", files: map[string]string{"allow": "# comment\n\nexample/* TestIdle the hardware is rare\n", "a/a_test.go": `package a
import "testing"
func TestIdle(t *testing.T) { t.Skip("no such hardware") }
`},
			args: []string{"-allow", "allow"}, output: []string{"allowed: the hardware is rare", "0 passed, 0 failed, 1 skipped"},
		},
		{
			name: "does not compile", files: map[string]string{"a/a_test.go": good, "b/b_test.go": "package b\nvar x int = y\n"},
			err: "1 packages failed outside their tests", output: []string{"FAIL  example/b", "undefined: y", "2 passed, 0 failed"},
		},
		{
			name: "panics", files: map[string]string{"a/a_test.go": `package a
import "testing"
func TestPanic(t *testing.T) { panic("out of luck") }
`},
			err: "1 tests failed", output: []string{"out of luck", "0 passed, 1 failed"},
		},
		{
			name: "exits", files: map[string]string{"a/a_test.go": `package a
import ("testing"; "os")
func TestExit(t *testing.T) { os.Stderr.WriteString("last words\n"); os.Exit(3) }
`},
			err: "failed", output: []string{"last words"},
		},
		{
			name: "no test", files: map[string]string{"a/a.go": "package a\n"},
			err: "no test ran", output: []string{"0 passed, 0 failed, 0 skipped"},
		},
		{
			name: "verbose", files: map[string]string{"a/a_test.go": good},
			args: []string{"-v"}, output: []string{"      TestGood"},
		},
		{
			name: "slow ones", files: map[string]string{"a/a_test.go": good, "a/slow_test.go": `package a
import ("testing"; "time")
func TestSlow(*testing.T) { time.Sleep(500 * time.Millisecond) }
`},
			args: []string{"-slow", "400ms"}, output: []string{"      TestSlow"}, absent: "TestGood",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			writeModule(t, test.files)
			var out strings.Builder
			err := run(t.Context(), append(test.args, "--", "./..."), &out)
			switch {
			case test.err == "" && err != nil:
				t.Errorf("failed: %v", err)
			case test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)):
				t.Errorf("error %v, want …%s…", err, test.err)
			}
			for _, want := range test.output {
				if !strings.Contains(out.String(), want) {
					t.Errorf("no %q in the output", want)
				}
			}
			if test.absent != "" && strings.Contains(out.String(), test.absent) {
				t.Errorf("%q is in the output", test.absent)
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}

func TestReadAllowedRefuses(t *testing.T) {
	for _, text := range []string{"pkg TestX\n", "pkg [ reason\n"} {
		file := filepath.Join(t.TempDir(), "allow")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := readAllowed(file); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
	if _, err := readAllowed(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a missing file was taken")
	}
}

// TestOutputIsBounded: a test that prints without end costs little.
func TestOutputIsBounded(t *testing.T) {
	var tl tail
	for range 10_000 {
		tl.add(strings.Repeat("x", 99) + "\n")
	}
	if len(tl.String()) > outputLimit+10 || !strings.HasPrefix(tl.String(), "[…]") {
		t.Errorf("%d bytes kept", len(tl.String()))
	}
}
