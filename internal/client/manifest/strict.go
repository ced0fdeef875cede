package manifest

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// Unmarshal decodes one YAML document. A field that T lacks is an error. Errors name
// the position in the document, such as spec.volumes[1].readOnly.
func Unmarshal[T any](doc []byte) (v T, err error) {
	err = yaml.UnmarshalStrict(doc, &v)
	if err == nil {
		return v, nil
	}
	// The decoder's error has neither the position nor the known fields. So the document
	// is compared with the type once more to find them. Only the decoder decides whether
	// the document is valid.
	var tree any
	if yaml.Unmarshal(doc, &tree) != nil {
		return v, plain(err)
	}
	var e explanation
	e.compare(reflect.TypeFor[T](), tree, "")
	if len(e.problems) == 0 {
		return v, plain(err)
	}
	return v, errors.New(strings.Join(e.problems, "; "))
}

// plain returns an error of the YAML library without its words about its own
// steps.
func plain(err error) error {
	text := strings.Join(strings.Fields(err.Error()), " ")
	for _, step := range []string{"error converting YAML to JSON: ", "error unmarshaling JSON: while decoding JSON: ", "yaml: unmarshal errors: ", "yaml: "} {
		text = strings.TrimPrefix(text, step)
	}
	return errors.New(text)
}

// maxProblems bounds how many problems of one document are reported.
const maxProblems = 5

// explanation lists the differences between a document and a type.
type explanation struct{ problems []string }

func (e *explanation) addf(path, format string, args ...any) {
	if path == "" {
		path = "the document"
	}
	if len(e.problems) < maxProblems {
		e.problems = append(e.problems, path+": "+fmt.Sprintf(format, args...))
	}
}

// compare notes how the value at a path differs from a type. Its recursion is as deep
// as the document, whose depth the YAML library bounds.
func (e *explanation) compare(t reflect.Type, value any, path string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if value == nil { // null counts as missing
		return
	}
	if p := reflect.PointerTo(t); p.Implements(reflect.TypeFor[json.Unmarshaler]()) || p.Implements(reflect.TypeFor[encoding.TextUnmarshaler]()) {
		e.decode(t, value, path)
		return
	}
	switch t.Kind() {
	case reflect.Struct:
		e.compareStruct(t, value, path)
	case reflect.Map:
		fields, ok := value.(map[string]any)
		if !ok {
			e.addf(path, "it is %s, and must be fields", kindOf(value))
		}
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			e.compare(t.Elem(), fields[name], join(path, name))
		}
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			e.decode(t, value, path)
			return
		}
		list, ok := value.([]any)
		if !ok {
			e.addf(path, "it is %s, and must be a list", kindOf(value))
		}
		for i, item := range list {
			e.compare(t.Elem(), item, fmt.Sprintf("%s[%d]", path, i))
		}
	default:
		e.compareScalar(t, value, path)
	}
}

func (e *explanation) compareStruct(t reflect.Type, value any, path string) {
	given, ok := value.(map[string]any)
	if !ok {
		e.addf(path, "it is %s, and must be fields", kindOf(value))
		return
	}
	known := fieldsOf(t)
	for _, name := range slices.Sorted(maps.Keys(given)) {
		i := slices.IndexFunc(known, func(f field) bool { return strings.EqualFold(f.name, name) }) // as the decoder does
		if i < 0 {
			e.addf(join(path, name), "unknown field; %s", suggest(name, known))
			continue
		}
		e.compare(known[i].typ, given[name], join(path, name))
	}
}

// compareScalar compares a value that is neither a list nor has fields. A field of text
// also accepts numbers, true and false, as in the YAML library.
func (e *explanation) compareScalar(t reflect.Type, value any, path string) {
	var want string
	var fits bool
	switch number, isNumber := value.(float64); t.Kind() {
	case reflect.String:
		_, isText := value.(string)
		_, isBool := value.(bool)
		want, fits = "text", isText || isNumber || isBool
	case reflect.Bool:
		_, fits = value.(bool)
		want = "true or false"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		most := math.Ldexp(1, t.Bits()-1)
		want, fits = "a whole number", isNumber && number == math.Trunc(number) && -most <= number && number < most
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		want, fits = "a whole number, 0 or more", isNumber && number == math.Trunc(number) && 0 <= number && number < math.Ldexp(1, t.Bits())
	case reflect.Float32, reflect.Float64:
		want, fits = "a number", isNumber
	default:
		return
	}
	switch {
	case fits:
	case strings.HasPrefix(want, "a whole") && kindOf(value) == "a number":
		e.addf(path, "%v is not possible: it must be %s of at most %d bits", value, want, t.Bits())
	default:
		e.addf(path, "it is %s, and must be %s", kindOf(value), want)
	}
}

// decode lets a type with its own decoder report the problem.
func (e *explanation) decode(t reflect.Type, value any, path string) {
	b, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(b, reflect.New(t).Interface())
	}
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong):
		e.addf(path, "it is %s, which is not possible", kindOf(value))
	case err != nil:
		e.addf(path, "%v", err)
	}
}

// kindOf names the kind of a value in words for users. It never returns the value
// itself, which may be a secret.
func kindOf(value any) string {
	switch value.(type) {
	case map[string]any:
		return "fields"
	case []any:
		return "a list"
	case string:
		return "text"
	case bool:
		return "true or false"
	}
	return "a number"
}

// field is a field of a type.
type field struct {
	name string
	typ  reflect.Type
}

// fieldsOf lists the fields of a struct by their names in documents, in order.
func fieldsOf(t reflect.Type) (all []field) {
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported() && !f.Anonymous:
		case name == "" && f.Anonymous && f.Type.Kind() == reflect.Struct:
			all = append(all, fieldsOf(f.Type)...)
		case name == "":
			all = append(all, field{f.Name, f.Type})
		default:
			all = append(all, field{name, f.Type})
		}
	}
	return all
}

// simple matches a name that needs no quotes in a path.
var simple = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

func join(path, name string) string {
	switch {
	case !simple.MatchString(name):
		return fmt.Sprintf("%s[%.80q]", path, name)
	case path == "":
		return name
	}
	return path + "." + name
}

// suggest names the field that was probably meant, or else the existing fields.
func suggest(name string, known []field) string {
	names := make([]string, 0, len(known))
	best, least := "", 1+len(name)/3
	for _, f := range known {
		names = append(names, f.name)
		if d := distance(strings.ToLower(name), strings.ToLower(f.name), least); d <= least && (best == "" || d < least) {
			best, least = f.name, d
		}
	}
	switch {
	case best != "":
		return fmt.Sprintf("did you mean %s?", best)
	case len(names) == 0:
		return "there are none here"
	}
	return "there are " + strings.Join(names, ", ")
}

// distance is the number of letters that must be inserted, deleted, replaced or
// swapped with the next one to turn one word into the other. Above most it returns
// any number above most.
func distance(a, b string, most int) int {
	if d := len(a) - len(b); d > most || -d > most {
		return most + 1
	}
	rows := [3][]int{make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)}
	for j := range rows[1] {
		rows[1][j] = j
	}
	for i := 1; i <= len(a); i++ {
		before, last, now := rows[(i+2)%3], rows[i%3], rows[(i+1)%3]
		now[0] = i
		for j := 1; j <= len(b); j++ {
			replaced := last[j-1]
			if a[i-1] != b[j-1] {
				replaced++
			}
			now[j] = min(last[j]+1, now[j-1]+1, replaced)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				now[j] = min(now[j], before[j-2]+1)
			}
		}
	}
	return rows[(len(a)+1)%3][len(b)]
}
