// Command apidoc writes the reference of the REST API, from the API's
// description:
//
//	go run ./scripts/apidoc api/openapi.yaml > docs/api-reference.md
package main

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: apidoc OPENAPI.yaml")
		os.Exit(2)
	}
	if err := write(os.Stdout, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "apidoc:", err)
		os.Exit(1)
	}
}

// write writes the reference for a description.
func write(w io.Writer, file string) error {
	doc, err := openapi3.NewLoader().LoadFromFile(file)
	if err != nil {
		return err
	}
	p := &page{}
	p.line("# REST API reference")
	p.line("")
	p.line("Made from [api/openapi.yaml](../api/openapi.yaml) by `scripts/apidoc`; do not edit. [api.md](api.md) shows how to use it.")
	for _, tag := range tagsOf(doc) {
		p.line("\n## " + title(tag))
		for _, o := range operations(doc, tag) {
			p.operation(o)
		}
	}
	p.line("\n## Schemas")
	for _, name := range slices.Sorted(maps.Keys(doc.Components.Schemas)) {
		p.schema(name, doc.Components.Schemas[name].Value)
	}
	_, err = io.WriteString(w, p.b.String())
	return err
}

type page struct{ b strings.Builder }

func (p *page) line(s string) { p.b.WriteString(strings.TrimRight(s, " ") + "\n") }

// operation is one method of one path.
type operation struct {
	method, path string
	params       openapi3.Parameters
	*openapi3.Operation
}

var methods = []string{http.MethodGet, http.MethodHead, http.MethodPut, http.MethodPost, http.MethodPatch, http.MethodDelete}

// operations returns the operations with a tag; for the tag "" those without
// tags.
func operations(doc *openapi3.T, tag string) (out []operation) {
	for _, path := range slices.Sorted(maps.Keys(doc.Paths.Map())) {
		item := doc.Paths.Value(path)
		for _, method := range methods {
			o := item.GetOperation(method)
			if o == nil || tag == "" && len(o.Tags) > 0 || tag != "" && !slices.Contains(o.Tags, tag) {
				continue
			}
			out = append(out, operation{method, path, append(slices.Clone(item.Parameters), o.Parameters...), o})
		}
	}
	return out
}

// tagsOf returns the tags in the order of the description, and first "" if
// there are operations without tags.
func tagsOf(doc *openapi3.T) (tags []string) {
	if len(operations(doc, "")) > 0 {
		tags = append(tags, "")
	}
	for _, t := range doc.Tags {
		tags = append(tags, t.Name)
	}
	for _, path := range slices.Sorted(maps.Keys(doc.Paths.Map())) {
		for _, o := range doc.Paths.Value(path).Operations() {
			for _, t := range o.Tags {
				if !slices.Contains(tags, t) {
					tags = append(tags, t)
				}
			}
		}
	}
	return tags
}

func title(tag string) string {
	if tag == "" {
		return "Operations"
	}
	return strings.ToUpper(tag[:1]) + tag[1:]
}

func (p *page) operation(o operation) {
	p.line(fmt.Sprintf("\n### `%s %s`", o.method, o.path))
	for _, text := range []string{o.Summary, o.Description} {
		if text != "" {
			p.line("\n" + strings.TrimSpace(text))
		}
	}
	if len(o.params) > 0 {
		p.line("\n| parameter | in | type | |\n|---|---|---|---|")
		for _, ref := range o.params {
			param := ref.Value
			p.line(fmt.Sprintf("| `%s`%s | %s | %s | %s |", param.Name, star(param.Required), param.In, typeOf(param.Schema), cell(param.Description)))
		}
	}
	if o.RequestBody != nil {
		for _, media := range slices.Sorted(maps.Keys(o.RequestBody.Value.Content)) {
			p.line(fmt.Sprintf("\nBody: `%s` %s", media, typeOf(o.RequestBody.Value.Content[media].Schema)))
		}
	}
	p.line("\n| answer | type | |\n|---|---|---|")
	for _, status := range slices.Sorted(maps.Keys(o.Responses.Map())) {
		r := o.Responses.Value(status).Value
		var types []string
		for _, media := range slices.Sorted(maps.Keys(r.Content)) {
			types = append(types, "`"+media+"` "+typeOf(r.Content[media].Schema))
		}
		description := ""
		if r.Description != nil {
			description = *r.Description
		}
		p.line(fmt.Sprintf("| %s | %s | %s |", status, strings.Join(types, "<br>"), cell(description)))
	}
}

func (p *page) schema(name string, s *openapi3.Schema) {
	p.line("\n### " + name)
	if s.Description != "" {
		p.line("\n" + strings.TrimSpace(s.Description))
	}
	if len(s.Enum) > 0 {
		p.line("\nOne of " + enum(s) + ".")
	}
	if len(s.Properties) == 0 {
		if len(s.Enum) == 0 && s.Type != nil {
			p.line("\nType: " + typeOf(openapi3.NewSchemaRef("", s)))
		}
		return
	}
	p.line("\n| field | type | |\n|---|---|---|")
	for _, field := range slices.Sorted(maps.Keys(s.Properties)) {
		ref := s.Properties[field]
		p.line(fmt.Sprintf("| `%s`%s | %s | %s |", field, star(slices.Contains(s.Required, field)), typeOf(ref), cell(ref.Value.Description)))
	}
}

// star marks required fields.
func star(required bool) string {
	if required {
		return " \\*"
	}
	return ""
}

func enum(s *openapi3.Schema) string {
	var values []string
	for _, v := range s.Enum {
		values = append(values, fmt.Sprintf("`%v`", v))
	}
	return strings.Join(values, ", ")
}

// cell makes text fit into a cell of a table.
func cell(s string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(s), " "), "|", "\\|")
}

// typeOf names a type: by a link to its schema, or by its description.
func typeOf(ref *openapi3.SchemaRef) string {
	if ref == nil || ref.Value == nil {
		return ""
	}
	if name, ok := strings.CutPrefix(ref.Ref, "#/components/schemas/"); ok {
		return "[" + name + "](#" + strings.ToLower(name) + ")"
	}
	s := ref.Value
	for _, part := range slices.Concat(s.AllOf, s.OneOf, s.AnyOf) {
		return typeOf(part)
	}
	if len(s.Enum) > 0 {
		return enum(s)
	}
	switch {
	case s.Type.Is(openapi3.TypeArray):
		return "list of " + typeOf(s.Items)
	case s.Type.Is(openapi3.TypeObject) && s.AdditionalProperties.Schema != nil:
		return "map of " + typeOf(s.AdditionalProperties.Schema)
	case s.Type == nil:
		return "any"
	}
	t := strings.Join(s.Type.Slice(), " or ")
	if s.Format != "" {
		t += " (" + s.Format + ")"
	}
	return t
}
