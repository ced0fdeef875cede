package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
)

// pkg is the count of one folder with Go files, tests included.
type pkg struct {
	folder   string
	lines    int // of comments
	findings []finding
}

// finding is one place where a pattern matches.
type finding struct {
	file    string
	line    int
	pattern string
	text    string // the words around it
}

// rate is the number of findings per 100 lines of comments.
func (p *pkg) rate() float64 {
	if p.lines == 0 {
		return 0
	}
	return 100 * float64(len(p.findings)) / float64(p.lines)
}

// countFolders counts the packages in and below the folders, each package once.
func countFolders(folders []string) ([]*pkg, error) {
	byFolder := map[string]*pkg{}
	seen := map[string]bool{}
	for _, folder := range folders {
		err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir():
				name := d.Name()
				if path != folder && (strings.HasPrefix(name, ".") || name == "testdata" || name == "build") {
					return filepath.SkipDir
				}
				return nil
			case filepath.Ext(path) != ".go" || seen[filepath.Clean(path)]:
				return nil
			}
			seen[filepath.Clean(path)] = true
			lines, findings, err := countFile(path)
			if err != nil {
				return err
			}
			dir := filepath.Dir(path)
			p := byFolder[dir]
			if p == nil {
				p = &pkg{folder: dir}
				byFolder[dir] = p
			}
			p.lines += lines
			p.findings = append(p.findings, findings...)
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", folder, err)
		}
	}
	packages := make([]*pkg, 0, len(byFolder))
	for _, p := range byFolder {
		packages = append(packages, p)
	}
	slices.SortFunc(packages, func(a, b *pkg) int { return strings.Compare(a.folder, b.folder) })
	return packages, nil
}

// countFile returns the number of comment lines in a file, and the findings in
// them. For a generated file it returns zero and nil.
func countFile(path string) (int, []finding, error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return 0, nil, err
	}
	if ast.IsGenerated(file) {
		return 0, nil, nil
	}
	lines := 0
	var all []finding
	for _, group := range file.Comments {
		text := commentLines(set, group)
		lines += len(text)
		words := split(text)
		for _, f := range find(words) {
			f.file = path
			all = append(all, f)
		}
	}
	return lines, all, nil
}

// textLine is a line of a comment without its marker.
type textLine struct {
	number int
	text   string
}

// commentLines returns the lines of a group without directives.
func commentLines(set *token.FileSet, group *ast.CommentGroup) []textLine {
	var lines []textLine
	for _, c := range group.List {
		number := set.Position(c.Pos()).Line
		if text, ok := strings.CutPrefix(c.Text, "//"); ok {
			if directive(text) {
				continue
			}
			lines = append(lines, textLine{number, text})
			continue
		}
		text := strings.TrimSuffix(strings.TrimPrefix(c.Text, "/*"), "*/")
		for line := range strings.SplitSeq(text, "\n") {
			lines = append(lines, textLine{number, line})
			number++
		}
	}
	return lines
}

// directive reports whether a comment is for a program: //go:embed, //nolint:x.
func directive(text string) bool {
	if text == "" || text[0] < 'a' || text[0] > 'z' {
		return false
	}
	word, _, _ := strings.Cut(text, " ")
	return strings.Contains(word, ":") || word == "nolint" || word == "export"
}
