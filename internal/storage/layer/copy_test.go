package layer_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/storage/layer"
)

// TestCopyRefuses: Copy reports a different layer, from a file or a stream, and
// reports a failure to write by another error.
func TestCopyRefuses(t *testing.T) {
	content := bytes.Repeat([]byte("layer"), layer.PageSize)
	w := layer.NewWriter(io.Discard)
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	ref := w.Ref()
	changed := bytes.Clone(content)
	changed[len(changed)-1]++
	path := filepath.Join(t.TempDir(), "layer")
	for name, b := range map[string][]byte{"changed": changed, "longer": append(bytes.Clone(content), 0), "shorter": content[1:]} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		for from, src := range map[string]io.Reader{"file": f, "stream": bytes.NewReader(b)} {
			if err := layer.Copy(t.Context(), io.Discard, src, ref); !errors.Is(err, layer.ErrDamaged) {
				t.Errorf("%s %s: %v", name, from, err)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = full.Close() }() // no data was written to it
	if err := layer.Copy(t.Context(), full, strings.NewReader(string(content)), ref); err == nil || errors.Is(err, layer.ErrDamaged) {
		t.Errorf("a full disk: %v", err)
	}
}
