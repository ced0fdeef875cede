// Package archtest holds the rules about the tree that no compiler checks:
// who imports whom, how packages are named and documented, how long files are.
package archtest

import (
	"encoding/json"
	"errors"
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

// goPackage is what go list -json says about a package.
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
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-json"}, args...)...)
	cmd.Dir = moduleRoot(t)
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

// moduleRoot is the folder of go.mod.
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

// importRules says which packages of ours a package may import, tests aside.
// A package that is not listed may import any that no other rule closes.
// ARCHITECTURE.md has the same table with the reasons.
var importRules = map[string][]string{
	"internal/wire":      {},
	"internal/kvm":       {},
	"internal/guestmem":  {"internal/sched"},
	"internal/cpio":      {},
	"internal/assets":    {},
	"internal/gomonitor": {},
	"internal/sched":     {},
	"internal/lowmem":    {},
	"internal/lockdown":  {},
	"internal/jail":      {"internal/gomonitor"},
	"internal/stock":     {},
	"internal/procid":    {},
	"internal/seal":      {},
	"internal/guestmux":  {},

	"internal/jail/escapee": {"internal/kvm", "internal/lockdown"},

	"internal/guestrpc": {"internal/wire"},
	"internal/guest":    {"internal/guest/kernel", "internal/guestmux", "internal/guestrpc", "internal/wire"},

	"internal/guest/kernel": {},

	"internal/engine/gvisor": {"internal/assets", "internal/engine", "internal/engine/folder", "internal/engine/identity", "internal/guestrpc", "internal/gvisorctl", "internal/jail", "internal/layer", "internal/procid", "internal/seal", "internal/snapshot", "internal/vmmctl", "internal/wire"},

	"internal/virtio":   {"internal/guestmem"},
	"internal/vmm/acpi": {},
	"internal/vmm":      {"internal/kvm", "internal/guestmem", "internal/virtio", "internal/vmm/acpi", "internal/wire"},

	"internal/vmmctl":    {"internal/layer", "internal/wire"},
	"internal/vmmserver": {"internal/guestmem", "internal/kvm", "internal/layer", "internal/virtio", "internal/vmm", "internal/vmmctl"},
	"cmd/vmm":            {"internal/gomonitor", "internal/kvm", "internal/lockdown", "internal/lowmem", "internal/vmmctl", "internal/vmmserver"},

	"internal/image":        {"internal/image/debian", "internal/image/tree"},
	"internal/image/tree":   {},
	"internal/image/debian": {},

	"internal/journal":  {},
	"api/v1alpha1":      {},
	"internal/sandbox":  {"internal/engine", "internal/engine/ready", "internal/guestrpc", "internal/journal", "internal/seal", "internal/snapshot"},
	"internal/template": {"internal/engine", "internal/guestrpc", "internal/image", "internal/sandbox", "internal/snapshot"},
	"internal/manifest": {"api/v1alpha1", "internal/sandbox"},

	"internal/gvisorctl":       {"internal/vmmctl"},
	"internal/engine/folder":   {"internal/engine", "internal/layer", "internal/procid", "internal/snapshot"},
	"internal/engine/identity": {"internal/engine/folder", "internal/guestrpc"},
	"internal/engine/ready":    {"internal/engine", "internal/snapshot", "internal/stock"},

	"api/rest":        {},
	"internal/client": {"api/rest"},
	"internal/access": {"internal/journal", "internal/sandbox"},
	"internal/audit":  {},
	"api/node/v1":     {},
	"internal/server": {"api/node/v1", "api/rest", "internal/access", "internal/audit", "internal/guestrpc", "internal/sandbox"},

	"internal/tracing": {"internal/sandbox", "internal/server"},
	"internal/metrics": {"internal/image", "internal/sandbox", "internal/server"},

	"internal/layer":    {"internal/guestmem"},
	"internal/snapshot": {"internal/layer", "internal/seal"},

	"internal/snapshot/pack": {"internal/image", "internal/layer", "internal/snapshot"},

	"testbed":                  {"testbed/internal/inside", "testbed/internal/machine", "testbed/internal/wire"},
	"testbed/internal/wire":    {},
	"testbed/internal/inside":  {"internal/kvm", "testbed/internal/wire"},
	"testbed/internal/machine": {"internal/cpio", "testbed/internal/inside", "testbed/internal/wire"},
}

func TestImportRules(t *testing.T) {
	found := map[string]bool{}
	for _, p := range goList(t, "./...") {
		name := strings.TrimPrefix(p.ImportPath, module+"/")
		found[name] = true
		allowed, ruled := importRules[name]
		if !ruled {
			continue
		}
		for _, imp := range p.Imports {
			ours, ok := strings.CutPrefix(imp, module+"/")
			if ok && !slices.Contains(allowed, ours) {
				t.Errorf("%s imports %s; it may import only %v", name, ours, allowed)
			}
		}
	}
	for name := range importRules {
		if !found[name] {
			t.Errorf("there is a rule for %s, but no such package", name)
		}
	}
}

// TestTestbedIsNoLibrary: the product must not depend on what tests it.
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

// TestTestPackages: packages that are for tests are imported by tests only.
func TestTestPackages(t *testing.T) {
	const forTests = module + "/internal/sandbox/sandboxtest"
	for _, p := range goList(t, "./...") {
		if slices.Contains(p.Imports, forTests) {
			t.Errorf("%s imports %s in what is not a test", p.ImportPath, forTests)
		}
	}
}

// TestNoGVisorHere: gVisor is in a module of its own, and only there.
func TestNoGVisorHere(t *testing.T) {
	for _, p := range goList(t, "-deps", "./...") {
		if strings.HasPrefix(p.ImportPath, "gvisor.dev/") {
			t.Errorf("%s is linked into this module", p.ImportPath)
		}
	}
}

// TestObserversAreApart: what is counted and traced does not know by what.
func TestObserversAreApart(t *testing.T) {
	for _, p := range goList(t, "-deps", "./internal/sandbox", "./internal/server") {
		if strings.HasPrefix(p.ImportPath, "github.com/prometheus/") || strings.HasPrefix(p.ImportPath, "go.opentelemetry.io/") {
			t.Errorf("%s is linked into sandbox or server", p.ImportPath)
		}
	}
}

// vmmModules are the foreign modules that a vmm process may be made of.
var vmmModules = []string{"golang.org/x/sys"}

// vmmForbidden are packages of the standard library, and everything below
// them, that have no place in a process that faces a hostile guest.
var vmmForbidden = []string{"net/http", "net/rpc", "database", "html", "plugin", "os/exec", "crypto/tls"}

// vmmSizeLimit is room above today's size, so that growth is a decision.
const vmmSizeLimit = 4 << 20

// TestVMMIsSmall looks at everything that cmd/vmm is linked from.
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
	out := filepath.Join(t.TempDir(), "vmm")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "./cmd/vmm")
	cmd.Dir = moduleRoot(t)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build cmd/vmm: %v\n%s", err, said)
	}
	info, err := os.Stat(out)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("cmd/vmm: %.2f MiB", float64(info.Size())/(1<<20))
	if info.Size() > vmmSizeLimit {
		t.Errorf("cmd/vmm has %d bytes, more than %d: find out what came in, or raise the limit and say why", info.Size(), int64(vmmSizeLimit))
	}
}

// TestPackageDocs: exactly one file of a package has its doc comment, and the
// comment starts as godoc expects.
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

// emptyNames say nothing about what a package owns.
var emptyNames = []string{"util", "utils", "common", "types", "helper", "helpers", "misc", "shared", "base"}

func TestPackageNames(t *testing.T) {
	for _, p := range goList(t, "./...") {
		if slices.Contains(emptyNames, p.Name) {
			t.Errorf("package %s: name it after what it owns", p.ImportPath)
		}
	}
}
