package durable_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/durable"
)

func text(s string) func(*os.File) error {
	return func(f *os.File) error {
		_, err := f.WriteString(s)
		return err
	}
}

// check checks the names in a folder, and the content and mode of one file.
func check(t *testing.T, path, want string, mode fs.FileMode, names ...string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil || string(b) != want {
		t.Errorf("%s has %q (%v), want %q", path, b, err, want)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != mode {
		t.Errorf("%s: %v, %v, want mode %v", path, info, err, mode)
	}
	list, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, e := range list {
		have = append(have, e.Name())
	}
	if !slices.Equal(have, names) {
		t.Errorf("the folder has %q, want %q", have, names)
	}
}

func TestReplace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	if err := durable.WriteFile(path, []byte("one"), 0o640); err != nil {
		t.Fatal(err)
	}
	check(t, path, "one", 0o640, "a")
	failed := errors.New("the disk is full")
	err := durable.Replace(path, 0o600, func(f *os.File) error {
		_, err := f.WriteString("half")
		return errors.Join(err, failed)
	})
	if !errors.Is(err, failed) {
		t.Errorf("a fill that fails: %v", err)
	}
	check(t, path, "one", 0o640, "a")
	if err := durable.Replace(path, 0o400, text("two")); err != nil {
		t.Fatal(err)
	}
	check(t, path, "two", 0o400, "a")
	if err := durable.ReplaceVolatile(path, []byte("three"), 0o600); err != nil {
		t.Fatal(err)
	}
	check(t, path, "three", 0o600, "a")
	if err := durable.WriteFile(filepath.Dir(path), nil, 0o600); err == nil {
		t.Error("a folder was replaced by a file")
	}
}

func TestCreate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	failed := errors.New("the disk is full")
	if err := durable.Create(path, 0o600, func(*os.File) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("a fill that fails: %v", err)
	}
	// Another call makes the file while this one fills its own.
	err := durable.Create(path, 0o600, func(*os.File) error {
		return durable.Create(path, 0o400, text("first"))
	})
	if !errors.Is(err, fs.ErrExist) {
		t.Errorf("a name that is taken meanwhile: %v, want %v", err, fs.ErrExist)
	}
	check(t, path, "first", 0o400, "a")
	filled := false
	err = durable.Create(path, 0o600, func(*os.File) error { filled = true; return nil })
	if !errors.Is(err, fs.ErrExist) || filled {
		t.Errorf("a name that is taken: %v, filled: %v", err, filled)
	}
}

// TestFolder fills a folder and then gives it its name.
func TestFolder(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "made"), 0o700); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	made, err := root.OpenRoot("made")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = made.Close() })
	if err := durable.WriteNew(made, "a", []byte("one")); err != nil {
		t.Fatal(err)
	}
	if err := durable.WriteNew(made, "a", nil); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second file of a name: %v", err)
	}
	if err := errors.Join(durable.SyncRoot(made), os.Mkdir(filepath.Join(dir, "taken"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := durable.Place(root, "made", "taken"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a folder in the place of another: %v", err)
	}
	if err := errors.Join(durable.Place(root, "made", "here"), durable.SyncRoot(root)); err != nil {
		t.Fatal(err)
	}
	check(t, filepath.Join(dir, "here", "a"), "one", 0o400, "a")
}

// TestOrder checks the system calls of each write, in their order. If one of them were
// missing, a power cut could leave an empty file under the name, or no name.
func TestOrder(t *testing.T) {
	file, folder := "fsync file", "fsync folder"
	for name, want := range map[string][]string{
		"replace":  {"write file", file, "rename", folder},
		"create":   {"write file", file, "link", folder},
		"volatile": {"write file", "rename"},
		"new":      {"write file", file, folder},
		"place":    {"rename", folder},
		"move":     {"rename", "fsync to", folder},
	} {
		t.Run(name, func(t *testing.T) {
			if got := traced(t, name); !slices.Equal(got, want) {
				t.Errorf("%s: %s", strings.Join(got, ", "), "want "+strings.Join(want, ", "))
			}
		})
	}
}

// act performs the writes that TestOrder traces, in a process of its own.
func act(name, dir string) error {
	path := filepath.Join(dir, "a")
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	switch name {
	case "replace":
		return durable.Replace(path, 0o600, text("one"))
	case "create":
		return durable.Create(path, 0o600, text("one"))
	case "volatile":
		return durable.ReplaceVolatile(path, []byte("one"), 0o600)
	case "new":
		return errors.Join(durable.WriteNew(root, "a", []byte("one")), durable.SyncRoot(root))
	case "place":
		return errors.Join(durable.Place(root, "from", "a"), durable.SyncRoot(root))
	case "move":
		return durable.Rename(filepath.Join(dir, "from"), filepath.Join(dir, "to", "from"))
	}
	return errors.New("no such act")
}
