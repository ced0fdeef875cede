package main

import (
	"os"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
)

// TestCurrent: the reference is up to date with the description, and has every
// operation and every schema.
func TestCurrent(t *testing.T) {
	const description, reference = "../../api/openapi.yaml", "../../docs/api-reference.md"
	var want strings.Builder
	if err := write(&want, description); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want.String() {
		t.Error("docs/api-reference.md is not current: run `make docs`")
	}
	doc, err := openapi3.NewLoader().LoadFromFile(description)
	if err != nil {
		t.Fatal(err)
	}
	for path, item := range doc.Paths.Map() {
		for method := range item.Operations() {
			if !strings.Contains(want.String(), "### `"+method+" "+path+"`\n") {
				t.Errorf("%s %s is missing", method, path)
			}
		}
	}
	for name := range doc.Components.Schemas {
		if !strings.Contains(want.String(), "### "+name+"\n") {
			t.Errorf("schema %s is missing", name)
		}
	}
}
