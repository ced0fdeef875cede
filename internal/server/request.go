package server

import (
	"context"
	"strings"
	"unicode/utf8"

	"agentrun.dev/internal/sandbox"
)

// Named is the key of what is made of an object: by the name that was given, or
// by one that is made up.
func Named(of sandbox.Key, given string) (k sandbox.Key, err error) {
	k = sandbox.Key{Namespace: of.Namespace, Name: sandbox.NewName(of.Name)}
	if given != "" {
		k.Name, err = sandbox.ParseName(given)
	}
	return k, err
}

// CheckText refuses what no C string can hold, and what is not text.
func CheckText(field, s string) error {
	if !utf8.ValidString(s) || strings.IndexByte(s, 0) >= 0 {
		return sandbox.Invalid(field, "it has a NUL or is not valid UTF-8")
	}
	return nil
}

// Trimmed shortens untrusted text in an error.
func Trimmed(s string) string { return TrimmedTo(s, 80) }

// TrimmedTo shortens untrusted text to a length.
func TrimmedTo(s string, most int) string {
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}

// Bounds of a page.
const (
	defaultPage = 100
	maxPage     = 1000
)

// Page reads the parameters of a list. It asks for one object more than it
// shows, to know whether there is a next page.
func Page(limit *int, after string) (sandbox.Page, error) {
	n := defaultPage
	if limit != nil {
		n = *limit
	}
	if n < 1 || n > maxPage {
		return sandbox.Page{}, sandbox.Invalid("limit", "%d is not between 1 and %d", n, maxPage)
	}
	if err := CheckText("after", after); err != nil {
		return sandbox.Page{}, err
	}
	return sandbox.Page{After: after, Limit: n + 1}, nil
}

// maxPageBytes is how large the objects of a page may become together before the page ends:
// a message of gRPC has at most 4 MiB. A page has one object at least.
const maxPageBytes = 1 << 20

// List finds the objects of a page and shows them, as many as were asked for or as fit;
// next is where the next page begins, and empty if there is none. size is how many bytes
// one is that is shown.
func List[T, R any](ctx context.Context, n sandbox.Namespace, p sandbox.Page,
	find func(context.Context, sandbox.Namespace, sandbox.Page) ([]T, error), position func(T) string,
	show func(context.Context, T) (R, error), size func(R) int,
) (items []R, next string, err error) {
	items = []R{}
	after, bytes := p.After, 0
	for left := p.Limit; ; {
		found, err := find(ctx, n, sandbox.Page{After: after, Limit: left, Bytes: maxPageBytes})
		if err != nil {
			return nil, "", err
		}
		if len(found) == 0 {
			return items, "", nil
		}
		for _, one := range found {
			if left == 1 || bytes >= maxPageBytes { // there is one more than is shown
				return items, after, nil
			}
			left, after = left-1, position(one)
			shown, err := show(ctx, one)
			if sandbox.HasCode(err, sandbox.CodeNotFound) {
				continue // it was deleted meanwhile
			}
			if err != nil {
				return nil, "", err
			}
			items = append(items, shown)
			bytes += size(shown)
		}
	}
}

// Plain is show, for List, of what is shown without asking further.
func Plain[T, R any](show func(T) R) func(context.Context, T) (R, error) {
	return func(_ context.Context, v T) (R, error) { return show(v), nil }
}
