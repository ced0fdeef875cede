package archtest

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// glossary is the page that defines the words.
const glossary = "docs/glossary.md"

var (
	term   = regexp.MustCompile(`(?m)^\| \*\*(.+)\*\* \| (.+) \| (.+) \|$`)
	unused = regexp.MustCompile("(?m)^\\| (`.+) \\| (.+) \\|$")
	quoted = regexp.MustCompile("`([^`]+)`")
)

func readGlossary(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(moduleRoot(t), glossary))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestGlossary: every term is there once, in alphabetical order, and the names
// given for it exist in the code.
func TestGlossary(t *testing.T) {
	rows := term.FindAllStringSubmatch(readGlossary(t), -1)
	if len(rows) < 30 || len(rows) > 60 {
		t.Errorf("%s has %d terms: with fewer it says too little, with more nobody reads it", glossary, len(rows))
	}
	names := declaredNames(t)
	for i, row := range rows {
		if i > 0 && cmp.Compare(strings.ToLower(rows[i-1][1]), strings.ToLower(row[1])) >= 0 {
			t.Errorf("%s: %s is behind %s", glossary, row[1], rows[i-1][1])
		}
		code := quoted.FindAllStringSubmatch(row[3], -1)
		if len(code) == 0 {
			t.Errorf("%s: where in the code is %s?", glossary, row[1])
		}
		for _, name := range code {
			if !names[name[1]] && !isFolder(t, "internal/"+name[1]) && !isFolder(t, name[1]) {
				t.Errorf("%s: %s is %s, which does not exist", glossary, row[1], name[1])
			}
		}
	}
}

func isFolder(t *testing.T, path string) bool {
	t.Helper()
	fi, err := os.Stat(filepath.Join(moduleRoot(t), path))
	return err == nil && fi.IsDir()
}

// TestUnusedNames: a name that the glossary replaces by another one is not declared
// again. A name with a dot is banned only in that package, or for that type: elsewhere
// the word may be right. Generated code is exempt, because its names come from its
// source.
func TestUnusedNames(t *testing.T) {
	instead := map[string]string{}
	for _, row := range unused.FindAllStringSubmatch(readGlossary(t), -1) {
		for _, name := range quoted.FindAllStringSubmatch(row[1], -1) {
			instead[name[1]] = row[2]
		}
	}
	if len(instead) == 0 {
		t.Fatalf("%s lists no names that are not used", glossary)
	}
	declared := declaredNames(t)
	known := packagesOf(declared)
	for name, better := range instead {
		if !strings.Contains(name, ".") {
			continue
		}
		pkg, _, _ := strings.Cut(name, ".")
		if !known[pkg] {
			t.Errorf("%s: there is no package %s for %s to be in", glossary, pkg, name)
		}
		if declared[name] {
			t.Errorf("%s is declared: write %s (%s)", name, better, glossary)
		}
	}
	goFiles(t, func(path string, fset *token.FileSet, file *ast.File) {
		for _, id := range declarations(file) {
			if better, ok := instead[id.Name]; ok {
				t.Errorf("%s:%d declares %s: write %s (%s)", path, fset.Position(id.Pos()).Line, id.Name, better, glossary)
			}
		}
	})
}

// packagesOf returns the packages of these names.
func packagesOf(declared map[string]bool) map[string]bool {
	all := map[string]bool{}
	for name := range declared {
		pkg, _, _ := strings.Cut(name, ".")
		all[pkg] = true
	}
	return all
}

// goFiles calls f with every Go file that is not generated.
func goFiles(t *testing.T, f func(path string, fset *token.FileSet, file *ast.File)) {
	t.Helper()
	fset := token.NewFileSet()
	sourceFiles(t, func(path string, data []byte) {
		if !strings.HasSuffix(path, ".go") || generated.Match(data) {
			return
		}
		file, err := parser.ParseFile(fset, path, data, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		f(path, fset, file)
	})
}

// declarations returns all names that a file declares.
func declarations(file *ast.File) (ids []*ast.Ident) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			ids = append(ids, n.Name)
		case *ast.TypeSpec:
			ids = append(ids, n.Name)
		case *ast.ValueSpec:
			ids = append(ids, n.Names...)
		case *ast.Field:
			ids = append(ids, n.Names...)
		case *ast.AssignStmt:
			for _, x := range n.Lhs {
				if id, ok := x.(*ast.Ident); ok && n.Tok == token.DEFINE {
					ids = append(ids, id)
				}
			}
		}
		return true
	})
	return ids
}

// declaredNames returns all declared names in the form package.Name, and fields
// and methods as package.Type.Member.
func declaredNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	goFiles(t, func(path string, _ *token.FileSet, file *ast.File) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		pkg := file.Name.Name + "."
		for _, d := range file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				names[pkg+receiver(d)+d.Name.Name] = true
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					for _, name := range specNames(spec) {
						names[pkg+name] = true
					}
				}
			}
		}
	})
	return names
}

// receiver returns the type of a method with a dot after it.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	var name string
	ast.Inspect(d.Recv.List[0].Type, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && name == "" {
			name = id.Name + "."
		}
		return true
	})
	return name
}

// specNames returns the names that a declaration declares, and the members of a
// type.
func specNames(spec ast.Spec) (names []string) {
	switch s := spec.(type) {
	case *ast.ValueSpec:
		for _, id := range s.Names {
			names = append(names, id.Name)
		}
	case *ast.TypeSpec:
		names = append(names, s.Name.Name)
		var members *ast.FieldList
		switch x := s.Type.(type) {
		case *ast.StructType:
			members = x.Fields
		case *ast.InterfaceType:
			members = x.Methods
		default:
			return names
		}
		for _, f := range members.List {
			for _, id := range f.Names {
				names = append(names, s.Name.Name+"."+id.Name)
			}
		}
	}
	return names
}
