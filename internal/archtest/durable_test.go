package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// renames lists the packages that may sync and rename files without durable,
// with their reasons.
var renames = map[string]string{
	"internal/durable":                 "it is the one that does it",
	"internal/access/audit":            "it appends to a log, and numbers the full ones",
	"internal/guest/agent":             "it does what programs of its sandbox ask for, on their files",
	"internal/engine/enginetest":       "for tests",
	"internal/storage/layer/layertest": "for tests",
	"bench":                            "what is measured is not kept",
	"testbed/internal/qemu":            "what it makes is made again",
}

// TestDurableWrites: only package durable replaces whole files, so that no step
// is forgotten.
func TestDurableWrites(t *testing.T) {
	unused := map[string]bool{}
	for path := range renames {
		unused[path] = true
	}
	for _, p := range goList(t, "./...") {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		for _, name := range p.GoFiles {
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				what, ok := writesByHand(call)
				switch {
				case !ok:
				case renames[path] != "":
					delete(unused, path)
				default:
					t.Errorf("%s: %s: use internal/durable", fset.Position(call.Pos()), what)
				}
				return true
			})
		}
	}
	for path := range unused {
		t.Errorf("%s neither syncs nor renames files: remove it from renames", path)
	}
}

// writesByHand recognises a step of a durable write: a rename, or the sync of a file.
func writesByHand(call *ast.CallExpr) (string, bool) {
	s, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", false
	}
	of, _ := s.X.(*ast.Ident)
	if of != nil && (of.Name == "durable" || of.Name == "unix" && s.Sel.Name == "Sync") {
		return "", false
	}
	switch s.Sel.Name {
	case "Sync": // Sync with an argument is a request to an agent
		return s.Sel.Name, len(call.Args) == 0
	case "Fsync":
		return s.Sel.Name, len(call.Args) == 1
	case "Rename", "Renameat", "Renameat2":
		return s.Sel.Name, len(call.Args) > 1
	}
	return "", false
}
