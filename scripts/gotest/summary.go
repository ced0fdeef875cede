package main

import (
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"
	"time"
)

// outputLimit bounds how much of one test's output is kept. The end matters
// most.
const outputLimit = 256 << 10

// key names a test; for the package as a whole, test is empty.
type key struct{ pkg, test string }

// tail keeps the last outputLimit bytes.
type tail struct {
	text string
	cut  bool
}

func (t *tail) add(s string) {
	t.text += s
	if len(t.text) > outputLimit {
		t.text, t.cut = t.text[len(t.text)-outputLimit/2:], true
	}
}

func (t *tail) String() string {
	if t == nil {
		return ""
	}
	if t.cut {
		return "[…]\n" + t.text
	}
	return t.text
}

// packageCount counts the results of a package's tests.
type packageCount struct{ passed, failed, skipped int }

// summary turns events into a short report.
type summary struct {
	out     io.Writer
	allowed []allowance
	verbose bool          // print all passed tests
	slow    time.Duration // print passed tests that took at least this long; 0: no such lines

	output   map[key]*tail
	running  map[key]bool // started but not ended
	parents  map[key]bool // tests with subtests: only their leaves are counted
	packages map[string]*packageCount
	builds   map[string]*tail // output of builds, by import path

	total    packageCount
	broken   int // packages that failed outside their tests
	refused  int // skips without an allowance
	ranTests bool
}

func newSummary(out io.Writer, allowed []allowance) *summary {
	return &summary{
		out: out, allowed: allowed,
		output: map[key]*tail{}, running: map[key]bool{}, parents: map[key]bool{},
		packages: map[string]*packageCount{}, builds: map[string]*tail{},
	}
}

func (s *summary) event(e event) {
	k := key{e.Package, e.Test}
	switch e.Action {
	case "stray":
		fmt.Fprint(s.out, e.Output)
	case "build-output":
		addOutput(s.builds, e.ImportPath, e.Output)
	case "output":
		addOutput(s.output, k, e.Output)
	case "run":
		s.running[k] = true
		s.ranTests = true
		for parent := parentOf(e.Test); parent != ""; parent = parentOf(parent) {
			s.parents[key{e.Package, parent}] = true
		}
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.packageDone(e)
		} else {
			s.testDone(k, e)
		}
	}
}

func addOutput[K comparable](m map[K]*tail, k K, text string) {
	if m[k] == nil {
		m[k] = &tail{}
	}
	m[k].add(text)
}

func parentOf(test string) string {
	i := strings.LastIndexByte(test, '/')
	if i < 0 {
		return ""
	}
	return test[:i]
}

func (s *summary) count(pkg string) *packageCount {
	if s.packages[pkg] == nil {
		s.packages[pkg] = &packageCount{}
	}
	return s.packages[pkg]
}

func (s *summary) testDone(k key, e event) {
	delete(s.running, k)
	c, leaf := s.count(k.pkg), !s.parents[k]
	switch e.Action {
	case "pass":
		if leaf {
			c.passed++
		}
		slow := s.slow > 0 && e.Elapsed >= s.slow.Seconds()
		if slow || s.verbose && !strings.Contains(k.test, "/") {
			fmt.Fprintf(s.out, "      %-50s %8.2fs\n", k.test, e.Elapsed)
		}
	case "fail":
		if leaf {
			c.failed++
		}
		fmt.Fprintf(s.out, "FAIL  %s %s (%.2fs)\n%s", k.pkg, k.test, e.Elapsed, indent(s.output[k].String()))
	case "skip":
		c.skipped++
		s.skipped(k)
	}
	delete(s.output, k)
}

func (s *summary) skipped(k key) {
	for _, a := range s.allowed {
		if a.matches(k.pkg, k.test) {
			fmt.Fprintf(s.out, "skip  %s %s: allowed: %s\n", k.pkg, k.test, a.reason)
			return
		}
	}
	s.refused++
	fmt.Fprintf(s.out, "SKIP  %s %s: not allowed\n%s", k.pkg, k.test, indent(s.output[k].String()))
}

// indent indents a test's output and drops the framing lines of go test.
func indent(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		switch trimmed := strings.TrimSpace(line); {
		case trimmed == "", strings.HasPrefix(trimmed, "=== "), strings.HasPrefix(trimmed, "--- "):
		default:
			b.WriteString("        " + strings.TrimRight(line, "\n") + "\n")
		}
	}
	return b.String()
}

func (s *summary) packageDone(e event) {
	c := s.count(e.Package)
	s.total.passed += c.passed
	s.total.failed += c.failed
	s.total.skipped += c.skipped
	switch {
	case e.Action == "skip" || e.Action == "pass" && *c == (packageCount{}):
		fmt.Fprintf(s.out, "-     %-44s no tests\n", e.Package)
	case e.Action == "pass":
		fmt.Fprintf(s.out, "ok    %-44s %4d tests %8.2fs\n", e.Package, c.passed, e.Elapsed)
	default:
		fmt.Fprintf(s.out, "FAIL  %-44s %4d tests %8.2fs\n", e.Package, c.passed+c.failed, e.Elapsed)
		s.explainPackage(e, c)
	}
	for k := range s.output {
		if k.pkg == e.Package {
			delete(s.output, k)
		}
	}
}

// explainPackage prints why a package failed if its tests do not show it: it
// did not compile, it panicked, it timed out, or TestMain failed.
func (s *summary) explainPackage(e event, c *packageCount) {
	if e.FailedBuild != "" {
		s.broken++
		fmt.Fprint(s.out, indent(s.builds[e.FailedBuild].String()))
		return
	}
	var unfinished []string
	for k := range s.running {
		if k.pkg == e.Package {
			unfinished = append(unfinished, k.test)
		}
	}
	sort.Strings(unfinished)
	for _, test := range unfinished {
		k := key{e.Package, test}
		fmt.Fprintf(s.out, "FAIL  %s %s did not end\n%s", k.pkg, k.test, indent(s.output[k].String()))
		delete(s.running, k)
	}
	if c.failed == 0 {
		s.broken++
		fmt.Fprint(s.out, indent(s.output[key{e.Package, ""}].String()))
	}
}

// close prints the final line and returns an error unless the run counts as
// passed.
func (s *summary) close() error {
	fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped\n", s.total.passed, s.total.failed, s.total.skipped)
	var why []string
	if s.total.failed > 0 {
		why = append(why, fmt.Sprintf("%d tests failed", s.total.failed))
	}
	if s.broken > 0 {
		why = append(why, fmt.Sprintf("%d packages failed outside their tests", s.broken))
	}
	if s.refused > 0 {
		why = append(why, fmt.Sprintf("%d tests were skipped without leave (allow one, with its reason, in the file given by -allow)", s.refused))
	}
	if !s.ranTests {
		why = append(why, "no test ran")
	}
	if len(why) > 0 {
		return errors.New(strings.Join(why, "; "))
	}
	return nil
}
