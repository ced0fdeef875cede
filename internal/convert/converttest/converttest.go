// Package converttest is for tests: it checks that a conversion and its inverse
// carry every field.
package converttest

import (
	"encoding"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// Pair is a conversion and its inverse. T is a type of the vocabulary, A one of
// an API.
type Pair[T, A any] struct {
	From func(T) A
	To   func(A) (T, error)
	// Left lists the fields of T that A lacks, and Added those of A that From does
	// not set, each by its path and with a reason. A listed field stands for its own
	// fields, too.
	Left, Added map[string]string
	// Change makes the object valid after every field has got a value.
	Change func(*T)
}

// Check gives each field of an object its own value, and converts the object in
// both directions.
func (p Pair[T, A]) Check(t *testing.T) {
	t.Helper()
	var given T
	fill(reflect.ValueOf(&given).Elem(), reflect.TypeFor[T]().Name(), new(int))
	if p.Change != nil {
		p.Change(&given)
	}
	form := p.From(given)
	back, err := p.To(form)
	if err != nil {
		t.Errorf("%T: %v", given, err)
		return
	}
	left := listed(t, p.Left)
	compare(t, reflect.TypeFor[T]().String(), "", left, reflect.ValueOf(given), reflect.ValueOf(back))
	added := listed(t, p.Added)
	set(t, reflect.TypeFor[A]().String(), "", added, reflect.ValueOf(form))
	for of, unused := range map[string]map[string]bool{"left": left, "added": added} {
		for path, used := range unused {
			if !used {
				t.Errorf("%T: %s is listed as %s, and is carried", given, path, of)
			}
		}
	}
}

// listed returns a map of the fields; a value becomes true when its field is
// met.
func listed(t *testing.T, fields map[string]string) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for path, reason := range fields {
		if reason == "" {
			t.Errorf("%s is listed without a reason", path)
		}
		out[path] = false
	}
	return out
}

// leaf reports whether a value is compared as a whole, not field by field.
func leaf(v reflect.Value) bool {
	if _, isText := v.Interface().(encoding.TextMarshaler); isText { // times and rules
		return true
	}
	return v.Kind() != reflect.Struct || !strings.HasPrefix(v.Type().PkgPath(), "agentrun.dev/")
}

// compare compares field by field. The path of an embedded struct's field omits
// the struct's name.
func compare(t *testing.T, name, path string, left map[string]bool, a, b reflect.Value) {
	t.Helper()
	if _, ok := left[path]; ok {
		left[path] = left[path] || !reflect.DeepEqual(a.Interface(), b.Interface())
		return
	}
	if a.Kind() == reflect.Pointer && !a.IsNil() && !b.IsNil() {
		a, b = a.Elem(), b.Elem()
	}
	if a.Kind() == reflect.Slice && a.Len() == b.Len() {
		for i := range a.Len() {
			compare(t, name, path, left, a.Index(i), b.Index(i))
		}
		return
	}
	if leaf(a) {
		if !equal(a, b) {
			t.Errorf("%s: %s is %+v after both conversions, was %+v", name, path, b.Interface(), a.Interface())
		}
		return
	}
	for i := range a.NumField() {
		f := a.Type().Field(i)
		switch {
		case f.Anonymous:
			compare(t, name, path, left, a.Field(i), b.Field(i))
		case f.IsExported():
			compare(t, name, join(path, f.Name), left, a.Field(i), b.Field(i))
		}
	}
}

func equal(a, b reflect.Value) bool {
	if at, ok := a.Interface().(time.Time); ok {
		return at.Equal(b.Interface().(time.Time))
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

// set checks that every field of an API's form has a value.
func set(t *testing.T, name, path string, added map[string]bool, v reflect.Value) {
	t.Helper()
	if _, ok := added[path]; ok {
		added[path] = added[path] || v.IsZero()
		return
	}
	if v.IsZero() {
		t.Errorf("%s: nothing sets %s", name, path)
		return
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		set(t, name, path, added, v.Elem())
	case reflect.Slice:
		for i := range v.Len() {
			set(t, name, path, added, v.Index(i))
		}
	case reflect.Struct:
		if !strings.HasPrefix(v.Type().PkgPath(), "agentrun.dev/") {
			return
		}
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				set(t, name, join(path, f.Name), added, v.Field(i))
			}
		}
	}
}

func join(path, name string) string { return strings.TrimPrefix(path+"."+name, ".") }

// words are valid values of the types that allow only some values.
var words = map[reflect.Type]string{
	reflect.TypeFor[sandbox.Phase]():         string(sandbox.PhaseReady),
	reflect.TypeFor[sandbox.Stage]():         string(sandbox.AfterReady),
	reflect.TypeFor[sandbox.State]():         string(sandbox.Hibernated),
	reflect.TypeFor[sandbox.Reason]():        string(sandbox.ReasonOutOfMemory),
	reflect.TypeFor[sandbox.TimeoutAction](): string(sandbox.TimeoutHibernate),
	reflect.TypeFor[sandbox.Code]():          string(sandbox.CodeCapacity),
	reflect.TypeFor[sandbox.NetworkMode]():   string(sandbox.NetworkNone),
	reflect.TypeFor[sandbox.TokenHash]():     string(sandbox.HashToken("a token")),
	reflect.TypeFor[policy.Egress]():         string(policy.AllowByDefault),
}

// fill gives every field a value that no other field has, if its type has enough
// values.
func fill(v reflect.Value, path string, n *int) {
	*n++
	switch v.Interface().(type) {
	case policy.Rule:
		r, err := policy.ParseRule(fmt.Sprintf("udp://*.r%d.example:%d", *n, *n))
		if err != nil {
			panic(err)
		}
		v.Set(reflect.ValueOf(r))
		return
	case netip.AddrPort:
		v.Set(reflect.ValueOf(netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(*n)}), uint16(*n))))
		return
	case time.Time:
		v.Set(reflect.ValueOf(time.Date(2026, 11, 16, 20, 0, *n, *n, time.UTC)))
		return
	case time.Duration:
		v.SetInt(int64(*n) * int64(time.Second))
		return
	case sandbox.UID:
		v.SetString(fmt.Sprintf("Owner-%d", *n))
		return
	case sandbox.ID:
		v.SetString(fmt.Sprintf("%-20s", strings.Map(func(r rune) rune { return r - '0' + 'a' }, fmt.Sprintf("%020d", *n))))
		return
	}
	switch v.Kind() {
	case reflect.String:
		word, some := words[v.Type()]
		if !some {
			word = fmt.Sprintf("%s-%d", strings.ToLower(strings.ReplaceAll(path, ".", "-")), *n)
		}
		v.SetString(word)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), path, n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(v.Index(i), path, n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 2 {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fill(key, path+"-key", n)
			fill(value, path+"-value", n)
			v.SetMapIndex(key, value)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				fill(v.Field(i), f.Name, n)
			}
		}
	case reflect.Func: // messages have no functions
	default:
		panic(fmt.Sprintf("%s: a %s has no value here", path, v.Type()))
	}
}

// Same lists fields that are left or added for the same reason.
func Same(reason string, paths ...string) map[string]string {
	out := map[string]string{}
	for _, p := range paths {
		out[p] = reason
	}
	return out
}

// Both joins these lists.
func Both(lists ...map[string]string) map[string]string {
	out := map[string]string{}
	for _, l := range lists {
		maps.Copy(out, l)
	}
	return out
}
