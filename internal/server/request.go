package server

import (
	"context"
	"strings"
	"unicode/utf8"

	"agentrun.dev/internal/sandbox"
)

// Named returns the key of an object that is made from another one: with the
// given name, or else with a new name that begins with the other's.
func Named(of sandbox.Key, given string) (k sandbox.Key, err error) {
	k = sandbox.Key{Namespace: of.Namespace, Name: sandbox.NewName(of.Name)}
	if given != "" {
		k.Name, err = sandbox.ParseName(given)
	}
	return k, err
}

// CheckText refuses text that is not valid UTF-8, and text with a NUL, which no
// C string can hold.
func CheckText(field, s string) error {
	if !utf8.ValidString(s) || strings.IndexByte(s, 0) >= 0 {
		return sandbox.Invalid(field, "it has a NUL or is not valid UTF-8")
	}
	return nil
}

// Trimmed shortens untrusted text for an error.
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

// Page reads the parameters of a list. It asks for one object more than the
// page shows, to find out whether there is a next page.
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

// maxPageBytes ends a page when the objects on it have reached this size together: a
// message of gRPC has at most 4 MiB. A page has at least one object.
const maxPageBytes = 1 << 20

// List finds the objects of a page and shows them, up to the limit of the request and of
// maxPageBytes. next is where the next page begins; it is empty if there is none. size
// returns the size of a shown object in bytes.
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
			if left == 1 || bytes >= maxPageBytes { // there is one object more than the page shows
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

// Plain makes a show function for List from one that asks no one else and
// cannot fail.
func Plain[T, R any](show func(T) R) func(context.Context, T) (R, error) {
	return func(_ context.Context, v T) (R, error) { return show(v), nil }
}
