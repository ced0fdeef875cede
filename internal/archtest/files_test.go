package archtest

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The limits on a file's lines keep files short enough to be read at one
// sitting.
const (
	maxLines     = 500
	maxTestLines = 700
)

// sourceFiles calls f with every file of the tree except build results. path is
// relative to the module's root.
func sourceFiles(t *testing.T, f func(path string, data []byte)) {
	t.Helper()
	root := moduleRoot(t)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if rel == ".git" || rel == "build" || d.Name() == "node_modules" {
				return filepath.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		data, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			return nil // an editor's temporary file
		}
		if err != nil {
			return err
		}
		f(rel, data)
		return nil
	})
	if err != nil {
		t.Fatalf("walk the tree: %v", err)
	}
}

// generated matches the line that marks generated files.
var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

func TestFileLengths(t *testing.T) {
	sourceFiles(t, func(path string, data []byte) {
		if !strings.HasSuffix(path, ".go") || generated.Match(data) {
			return
		}
		limit := maxLines
		if strings.HasSuffix(path, "_test.go") {
			limit = maxTestLines
		}
		if n := bytes.Count(data, []byte("\n")); n > limit {
			t.Errorf("%s has %d lines, more than %d: split it by phase or by device", path, n, limit)
		}
	})
}

// machinePath matches folders that exist on one developer's machine. It does
// not match paths inside guests (/root, /home/user).
var machinePath = regexp.MustCompile(`/root/(go|src|\.cache)\b|/home/\w+/(go|src|\.cache)\b`)

func TestNoMachinePaths(t *testing.T) {
	root := moduleRoot(t) + "/"
	if strings.Count(root, "/") < 3 {
		root = "\x00" // a checkout at /src: its name is a part of other paths
	}
	sourceFiles(t, func(path string, data []byte) {
		if path == filepath.Join("internal", "archtest", "files_test.go") || bytes.IndexByte(data, 0) >= 0 {
			return
		}
		for i, line := range strings.Split(string(data), "\n") {
			if strings.Contains(line, root) || machinePath.MatchString(line) {
				t.Errorf("%s:%d names a folder of one machine: %s", path, i+1, strings.TrimSpace(line))
			}
		}
	})
}
