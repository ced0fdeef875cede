package rest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestGenerated: rest.gen.go is the output of go generate for openapi.yaml.
func TestGenerated(t *testing.T) {
	source, err := os.ReadFile("rest.go")
	if err != nil {
		t.Fatal(err)
	}
	_, line, found := strings.Cut(string(source), "//go:generate ")
	if !found {
		t.Fatal("rest.go has no go:generate line")
	}
	line, _, _ = strings.Cut(line, "\n")
	// The same command runs in another folder, because the generator writes
	// beside its configuration.
	root := t.TempDir()
	dir := filepath.Join(root, "rest")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{"config.yaml": dir, filepath.Join("..", "openapi.yaml"): root} {
		data, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, filepath.Base(from)), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	args := strings.Fields(line)
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Dir = dir
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", line, err, said)
	}
	want, err := os.ReadFile(filepath.Join(dir, "rest.gen.go"))
	if err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile("rest.gen.go")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, have) {
		t.Error("rest.gen.go is not what go generate makes of api/openapi.yaml: run go generate ./api/rest")
	}
}
