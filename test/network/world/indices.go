package world

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/cgi" //nolint:gosec // it is about versions of Go from before 1.6.3
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Wheel is a Python module that pip can install.
type Wheel struct{ Name, Version string }

// file is the name of the module's file, and bytes is its content: a module that
// knows its version.
func (w Wheel) file() string { return fmt.Sprintf("%s-%s-py3-none-any.whl", w.Name, w.Version) }

func (w Wheel) bytes(t testing.TB) []byte {
	t.Helper()
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	info := fmt.Sprintf("%s-%s.dist-info/", w.Name, w.Version)
	for _, f := range [][2]string{
		{w.Name + "/__init__.py", fmt.Sprintf("__version__ = %q\n", w.Version)},
		{info + "METADATA", fmt.Sprintf("Metadata-Version: 2.1\nName: %s\nVersion: %s\n", w.Name, w.Version)},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{info + "RECORD", ""},
	} {
		entry, err := z.Create(f[0])
		if err == nil {
			_, err = entry.Write([]byte(f[1]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// PythonIndex returns a simple index (PEP 503) and the handler for its files,
// which are at another URL, as with the public index.
func PythonIndex(t testing.TB, files string, wheels ...Wheel) (index, store http.Handler) {
	t.Helper()
	pages, stored := http.NewServeMux(), http.NewServeMux()
	for _, w := range wheels {
		content := w.bytes(t)
		sum := sha256.Sum256(content)
		page := fmt.Sprintf("<!DOCTYPE html><html><body><a href=\"%s/packages/%s#sha256=%x\">%s</a></body></html>", files, w.file(), sum, w.file())
		pages.HandleFunc("GET /simple/"+w.Name+"/", func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "text/html")
			_, _ = rw.Write([]byte(page))
		})
		stored.HandleFunc("GET /packages/"+w.file(), func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(content) })
	}
	return pages, stored
}

// DebianMirror serves a mirror of one package without signatures. Its entry in
// sources.list must say trusted=yes.
func DebianMirror(name, content string) http.Handler {
	pool := fmt.Sprintf("pool/%s_1_all.deb", name)
	sum := func(text string) string {
		s := sha256.Sum256([]byte(text))
		return hex.EncodeToString(s[:])
	}
	packages := fmt.Sprintf("Package: %s\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <nobody@example.org>\nDescription: for a test\nFilename: %s\nSize: %d\nSHA256: %s\n\n",
		name, pool, len(content), sum(content))
	release := fmt.Sprintf("Origin: Test\nSuite: stable\nCodename: stable\nArchitectures: amd64 all\nComponents: main\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n %s %d main/binary-amd64/Packages\n",
		sum(packages), len(packages))
	files := map[string]string{
		"dists/stable/Release": release, "dists/stable/main/binary-amd64/Packages": packages, pool: content,
	}
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		text, found := files[strings.TrimPrefix(r.URL.Path, "/debian/")]
		if !found {
			http.NotFound(rw, r)
			return
		}
		_, _ = rw.Write([]byte(text))
	})
}

// GitServer serves a repository with one file as /project.git, with Git's own
// program.
func GitServer(t testing.TB, file, content string) http.Handler {
	t.Helper()
	dir := t.TempDir()
	work, root := filepath.Join(dir, "work"), filepath.Join(dir, "root")
	git := func(args ...string) {
		cmd := exec.Command("git", args...)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
			"GIT_AUTHOR_NAME=test", "GIT_AUTHOR_EMAIL=test@example.org", "GIT_COMMITTER_NAME=test", "GIT_COMMITTER_EMAIL=test@example.org")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	git("init", "-q", "-b", "main", work)
	if err := os.WriteFile(filepath.Join(work, file), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	git("-C", work, "add", file)
	git("-C", work, "commit", "-q", "-m", "a file")
	git("clone", "-q", "--bare", work, filepath.Join(root, "project.git"))
	program, err := exec.LookPath("git")
	if err != nil {
		t.Fatal(err)
	}
	return &cgi.Handler{
		Path: program, Args: []string{"http-backend"},
		Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"},
	}
}
