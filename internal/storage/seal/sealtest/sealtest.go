// Package sealtest searches files for plain text that should be encrypted, for
// tests.
package sealtest

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// FilesWith lists the files below dir that contain text.
func FilesWith(t testing.TB, dir, text string) (found []string) {
	t.Helper()
	files := os.DirFS(dir)
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := fs.ReadFile(files, path)
		if bytes.Contains(b, []byte(text)) {
			found = append(found, filepath.Join(dir, path))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
