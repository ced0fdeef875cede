package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestReadValues(t *testing.T) {
	file := filepath.Join(t.TempDir(), "value")
	if err := os.WriteFile(file, []byte("from a file\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("FROM_ENV", "of the environment")
	got, err := readValues([]string{"A=b=c", "EMPTY=", "FILE=@" + file, "IN=-", "FROM_ENV"}, strings.NewReader("two\nlines\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]byte{
		"A": []byte("b=c"), "EMPTY": {}, "FILE": []byte("from a file"), "IN": []byte("two\nlines"), "FROM_ENV": []byte("of the environment"),
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%q, not %q", got, want)
	}
	for name, args := range map[string][]string{
		"twice": {"A=hunter2", "A=hunter2"}, "no key": {"=hunter2"}, "no file": {"A=@/no/such/file"}, "no variable": {"NO_SUCH_VARIABLE"}, "stdin twice": {"A=-", "B=-"},
	} {
		if _, err := readValues(args, strings.NewReader("hunter2")); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
