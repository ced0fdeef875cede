// Package archtest tests the rules about the tree that the compiler does not
// check: which packages import which, how packages are named and documented,
// how long files are.
package archtest

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "agentrun.dev"

// goPackage has the fields of go list -json.
type goPackage struct {
	Dir            string
	ImportPath     string
	Name           string
	Standard       bool
	GoFiles        []string
	CgoFiles       []string
	IgnoredGoFiles []string
	TestGoFiles    []string
	XTestGoFiles   []string
	Imports        []string
	TestImports    []string
	XTestImports   []string
	Module         *struct{ Path string }
}

// goList runs go list -json in the module's root.
func goList(t *testing.T, args ...string) []goPackage {
	t.Helper()
	return goListIn(t, ".", args...)
}

// goListIn runs it in a folder, which is relative to the module's root.
func goListIn(t *testing.T, dir string, args ...string) []goPackage {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-json"}, args...)...)
	cmd.Dir = filepath.Join(moduleRoot(t), dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %s: %v", strings.Join(args, " "), err)
	}
	var list []goPackage
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p goPackage
		switch err := dec.Decode(&p); {
		case errors.Is(err, io.EOF):
			return list
		case err != nil:
			t.Fatalf("decode the output of go list: %v", err)
		}
		list = append(list, p)
	}
}

// moduleRoot returns the folder of go.mod.
func moduleRoot(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("no go.mod above this package")
		}
		dir = filepath.Dir(dir)
	}
}

// rule is the map's entry of a package.
type rule struct {
	path    string // from the module's root
	owns    string
	imports []string
}

// group is a folder of internal/.
type group struct {
	name, owns string
	mayUse     []string // groups, or packages of them; all for *
}

func (g group) may(use string) bool {
	return slices.ContainsFunc(g.mayUse, func(of string) bool { return of == "*" || of == use || strings.HasPrefix(use, of+"/") })
}

// helperModule is the folder with the module of gVisor's helper.
const helperModule = "gvisor"

// TestMap: the map lists every package of both modules, with its imports.
func TestMap(t *testing.T) {
	rules := map[string]rule{}
	for _, r := range packages {
		rules[r.path] = r
	}
	for _, p := range slices.Concat(goList(t, "./..."), goListIn(t, helperModule, "./...")) {
		name := strings.TrimPrefix(p.ImportPath, module+"/")
		r, ok := rules[name]
		delete(rules, name)
		if len(p.GoFiles)+len(p.CgoFiles) == 0 {
			continue // tests only
		}
		if !ok || r.owns == "" {
			t.Errorf("%s is not on the map (map_test.go): say what it owns", name)
		}
		var ours []string
		for _, imp := range p.Imports {
			if imp, ok := strings.CutPrefix(imp, module+"/"); ok {
				ours = append(ours, strings.TrimPrefix(imp, "internal/"))
			}
		}
		if slices.Sort(ours); !slices.Equal(ours, r.imports) {
			t.Errorf("%s imports %q; the map says %q", name, ours, r.imports)
		}
	}
	for name := range rules {
		t.Errorf("%s is on the map, but there is no such package", name)
	}
}

// TestGroups: packages import only those packages that their group may import.
func TestGroups(t *testing.T) {
	byName := map[string]group{}
	for _, g := range groups {
		byName[g.name] = g
	}
	for _, r := range packages {
		path, ok := strings.CutPrefix(r.path, "internal/")
		if !ok {
			continue
		}
		name, _, _ := strings.Cut(path, "/")
		g, ok := byName[name]
		if !ok {
			t.Errorf("%s: there is no group %s", r.path, name)
		}
		for _, use := range r.imports {
			if other, _, _ := strings.Cut(use, "/"); byName[other].name != "" && other != name && !g.may(use) {
				t.Errorf("%s uses %s; %s may use %q", r.path, use, name, g.mayUse)
			}
		}
	}
}

var update = flag.Bool("update", false, "write the tables into ARCHITECTURE.md")

// TestTables: ARCHITECTURE.md shows the map.
func TestTables(t *testing.T) {
	file := filepath.Join(moduleRoot(t), "ARCHITECTURE.md")
	old, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := string(old)
	for name, table := range map[string]string{"groups": groupTable(), "packages": packageTable()} {
		begin, end := "<!-- "+name+": written by internal/archtest -->\n", "<!-- end of "+name+" -->\n"
		before, rest, ok := strings.Cut(text, begin)
		_, after, ended := strings.Cut(rest, end)
		if !ok || !ended {
			t.Fatalf("ARCHITECTURE.md has no place for the table of %s", name)
		}
		text = before + begin + table + end + after
	}
	if text == string(old) {
		return
	}
	if !*update {
		t.Fatal("the tables in ARCHITECTURE.md are not those of map_test.go: go test ./internal/archtest -run TestTables -update")
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func groupTable() string {
	var b strings.Builder
	b.WriteString("| folder of `internal/` | holds | may use |\n|---|---|---|\n")
	for _, g := range groups {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", g.name, g.owns, listed(g.mayUse))
	}
	return b.String()
}

func packageTable() string {
	var b strings.Builder
	b.WriteString("| package | what it owns | imports, of ours |\n|---|---|---|\n")
	for _, r := range packages {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", strings.TrimPrefix(r.path, "internal/"), r.owns, listed(r.imports))
	}
	return b.String()
}

func listed(names []string) string {
	switch {
	case len(names) == 0:
		return "–"
	case slices.Equal(names, []string{"*"}):
		return "all"
	}
	return "`" + strings.Join(names, "`, `") + "`"
}

// TestTestbedIsNoLibrary: the product must not depend on its testbed.
func TestTestbedIsNoLibrary(t *testing.T) {
	const testbed = module + "/testbed"
	for _, p := range goList(t, "./...") {
		if p.ImportPath == testbed || strings.HasPrefix(p.ImportPath, testbed+"/") {
			continue
		}
		for _, imp := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if imp == testbed || strings.HasPrefix(imp, testbed+"/") {
				t.Errorf("%s imports %s", p.ImportPath, imp)
			}
		}
	}
}

// forTests reports whether one of our packages is for tests, by its name or folder.
func forTests(path string) bool {
	return strings.HasPrefix(path, module+"/test/") || strings.HasPrefix(path, module+"/internal/") && strings.HasSuffix(path, "test")
}

// TestTestPackages: only tests import packages for tests.
func TestTestPackages(t *testing.T) {
	found := 0
	for _, p := range goList(t, "./...") {
		if forTests(p.ImportPath) {
			found++
			continue
		}
		for _, imp := range p.Imports {
			if forTests(imp) {
				t.Errorf("%s imports %s in what is not a test", p.ImportPath, imp)
			}
		}
	}
	if found < 2 {
		t.Errorf("%d packages are for tests: how are they called?", found)
	}
}

// TestDomainIsApart: the packages that define sandboxes and serve them do not depend
// on those that run them.
func TestDomainIsApart(t *testing.T) {
	for _, p := range goList(t, "-deps", "./internal/sandbox", "./internal/access", "./internal/convert/...", "./internal/server/...") {
		of, ours := strings.CutPrefix(p.ImportPath, module+"/internal/")
		group, _, _ := strings.Cut(of, "/")
		if ours && slices.Contains([]string{"engine", "storage", "vmm", "host"}, group) {
			t.Errorf("%s is linked into sandbox, access, convert or server", p.ImportPath)
		}
	}
}

// TestNoBenchInProduct: agentrun, which users install, contains neither
// benchmarks nor peers.
func TestNoBenchInProduct(t *testing.T) {
	for _, p := range goList(t, "-deps", "./cmd/agentrun") {
		if path := strings.TrimPrefix(p.ImportPath, module+"/"); path == "bench" || strings.HasPrefix(path, "bench/") {
			t.Errorf("cmd/agentrun depends on %s", p.ImportPath)
		}
	}
}

// ofGVisor is the only part of gVisor that this module uses, and usesGVisor the only
// package that uses it. The module of gVisor's helper uses the rest.
const (
	ofGVisor   = "gvisor.dev/gvisor/pkg/"
	usesGVisor = module + "/internal/network/stack"
)

// TestGVisor: only netd uses gVisor's TCP/IP. This module does not use those parts
// of gVisor that run sandboxes.
func TestGVisor(t *testing.T) {
	for _, p := range goList(t, "./...") {
		for _, imp := range p.Imports {
			if strings.HasPrefix(imp, "gvisor.dev/") && p.ImportPath != usesGVisor {
				t.Errorf("%s imports %s: only %s may", p.ImportPath, imp, usesGVisor)
			}
		}
	}
	for _, p := range goList(t, "-deps", "./cmd/netd") {
		if strings.HasPrefix(p.ImportPath, "gvisor.dev/") && (!strings.HasPrefix(p.ImportPath, ofGVisor) || strings.HasPrefix(p.ImportPath, ofGVisor+"sentry")) {
			t.Errorf("%s is linked into netd", p.ImportPath)
		}
	}
	others := []string{
		"./cmd/agentrun", "./cmd/bench", "./cmd/guest-agent", "./cmd/vmm", "./internal/node/forkd",
		"./internal/network/addresses", "./internal/network/netctl", "./internal/network/netproc", "./internal/network/policy",
	}
	for _, p := range goList(t, append([]string{"-deps"}, others...)...) {
		if strings.HasPrefix(p.ImportPath, "gvisor.dev/") {
			t.Errorf("%s is linked into a program that is not netd", p.ImportPath)
		}
	}
}

// TestObserversAreApart: node and server do not depend on the libraries for
// metrics and traces.
func TestObserversAreApart(t *testing.T) {
	for _, p := range goList(t, "-deps", "./internal/node", "./internal/server") {
		if strings.HasPrefix(p.ImportPath, "github.com/prometheus/") || strings.HasPrefix(p.ImportPath, "go.opentelemetry.io/") {
			t.Errorf("%s is linked into node or server", p.ImportPath)
		}
	}
}

// ofMachines are the packages of the vmm group that are linked into the daemon: those
// for talking to vmm processes, for their reports, and for asking KVM about the host.
var ofMachines = []string{"cpu", "kvm", "livefork", "vmmctl", "vmstate"}

// TestDaemonHasNoMachine: the code of machines, their devices and their memory
// is linked only into vmm processes.
func TestDaemonHasNoMachine(t *testing.T) {
	const group = module + "/internal/vmm"
	for _, p := range goList(t, "-deps", "./internal/node/forkd") {
		name, in := strings.CutPrefix(p.ImportPath, group+"/")
		if p.ImportPath == group || in && !slices.Contains(ofMachines, name) {
			t.Errorf("%s is linked into the daemon", p.ImportPath)
		}
	}
}

// vmmModules are the foreign modules that may be linked into a vmm process.
var vmmModules = []string{"golang.org/x/sys"}

// vmmForbidden are packages of the standard library that, with all packages
// below them, must not be in a process that faces a hostile guest.
var vmmForbidden = []string{"net/http", "net/rpc", "database", "html", "plugin", "os/exec", "crypto/tls"}

// vmmSizeLimit is above today's size. To raise it is a deliberate decision.
const vmmSizeLimit = 4 << 20

// TestVMMIsSmall checks all packages that are linked into cmd/vmm.
func TestVMMIsSmall(t *testing.T) {
	for _, p := range goList(t, "-deps", "./cmd/vmm") {
		switch {
		case p.Standard:
			for _, bad := range vmmForbidden {
				if p.ImportPath == bad || strings.HasPrefix(p.ImportPath, bad+"/") {
					t.Errorf("cmd/vmm depends on %s", p.ImportPath)
				}
			}
		case p.Module == nil:
			t.Errorf("cmd/vmm depends on %s, which is in no module", p.ImportPath)
		case p.Module.Path != module && !slices.Contains(vmmModules, p.Module.Path):
			t.Errorf("cmd/vmm depends on %s of module %s; allowed are %v", p.ImportPath, p.Module.Path, vmmModules)
		}
	}
	checkSize(t, "vmm", vmmSizeLimit)
}

// netdSizeLimit is above today's size, of which HTTP and TLS are about half.
const netdSizeLimit = 12 << 20

// TestNetdIsSmall: netd cannot start programs, and does not grow unnoticed.
func TestNetdIsSmall(t *testing.T) {
	for _, p := range goList(t, "-deps", "./cmd/netd") {
		if slices.Contains([]string{"os/exec", "plugin", "net/rpc"}, p.ImportPath) {
			t.Errorf("cmd/netd depends on %s", p.ImportPath)
		}
	}
	checkSize(t, "netd", netdSizeLimit)
}

// checkSize builds a program of cmd/ as for an installation, and checks its
// size.
func checkSize(t *testing.T, program string, limit int64) {
	t.Helper()
	out := filepath.Join(t.TempDir(), program)
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "./cmd/"+program)
	cmd.Dir = moduleRoot(t)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build cmd/%s: %v\n%s", program, err, said)
	}
	info, err := os.Stat(out)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("cmd/%s: %.2f MiB", program, float64(info.Size())/(1<<20))
	if info.Size() > limit {
		t.Errorf("cmd/%s has %d bytes, more than %d: find out what came in, or raise the limit and say why", program, info.Size(), limit)
	}
}

// TestPackageDocs: exactly one file of a package has a doc comment, which
// starts as godoc expects.
func TestPackageDocs(t *testing.T) {
	for _, p := range goList(t, "./...") {
		files := slices.Concat(p.GoFiles, p.CgoFiles, p.IgnoredGoFiles)
		if len(files) == 0 {
			files = slices.Concat(p.TestGoFiles, p.XTestGoFiles)
		}
		start := "Package " + p.Name + " "
		if p.Name == "main" {
			start = "Command " + filepath.Base(p.Dir) + " "
		}
		var documented []string
		for _, name := range files {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Errorf("%v", err)
				continue
			}
			if f.Doc == nil || ast.IsGenerated(f) || strings.HasSuffix(name, "_test.go") && strings.HasSuffix(f.Name.Name, "_test") {
				continue
			}
			documented = append(documented, name)
			if text := f.Doc.Text(); !strings.HasPrefix(text, start) {
				t.Errorf("%s: the doc in %s starts %q, not %q", p.ImportPath, name, firstLine(text), start)
			}
		}
		if len(documented) != 1 {
			t.Errorf("%s: %d files with a package doc (%s), want exactly one", p.ImportPath, len(documented), strings.Join(documented, ", "))
		}
	}
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// emptyNames are names that do not say what a package owns.
var emptyNames = []string{"util", "utils", "common", "types", "helper", "helpers", "misc", "shared", "base"}

func TestPackageNames(t *testing.T) {
	for _, p := range goList(t, "./...") {
		if slices.Contains(emptyNames, p.Name) {
			t.Errorf("package %s: name it after what it owns", p.ImportPath)
		}
	}
}
