package inject

import (
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// Request holds the parts of a request that the decision depends on.
type Request struct {
	// Target is the path with the query, as it was sent.
	Target string
	Header http.Header
	// Trailer has the names of the announced trailers.
	Trailer http.Header
}

// Use is one credential that a request gets: its header is set to Value.
type Use struct {
	Secret, Header string
	Value          Value
}

// Uses decides about a request to the host. It returns the credentials that the
// request asks for, if any, or the reason for refusing the request.
func (h *Host) Uses(r Request) ([]Use, error) {
	var uses []Use
	taken := map[string]bool{}
	for _, c := range h.Credentials {
		name := textproto.CanonicalMIMEHeaderKey(c.Header)
		if taken[name] {
			continue // decided with the first credential for this header
		}
		taken[name] = true
		if err := unambiguous(r, name); err != nil {
			return nil, err
		}
		values := r.Header[name]
		if len(values) == 0 {
			continue
		}
		if len(values) > 1 {
			return nil, fmt.Errorf("the header %s is there %d times", name, len(values))
		}
		use, err := h.use(name, values[0])
		if err != nil {
			return nil, err
		}
		uses = append(uses, use)
	}
	return uses, h.elsewhere(r, taken)
}

// use finds the credential for the value of a header.
func (h *Host) use(name, value string) (Use, error) {
	var wanted []string
	for _, c := range h.Credentials {
		if textproto.CanonicalMIMEHeaderKey(c.Header) != name {
			continue
		}
		form := c.form(c.Placeholder)
		wanted = append(wanted, fmt.Sprintf("%q", form))
		if value != form {
			continue
		}
		if c.Problem != "" {
			return Use{}, fmt.Errorf("%s: %s", c.Secret, c.Problem)
		}
		out := c.form(string(c.Value))
		if err := CheckValue(out); err != nil {
			return Use{}, fmt.Errorf("%s: %w", c.Secret, err)
		}
		return Use{Secret: c.Secret, Header: name, Value: Value(out)}, nil
	}
	return Use{}, fmt.Errorf("the header %s is not %s: it has to be exactly that, so that the credential can be put in", name, strings.Join(wanted, " or "))
}

// CheckValue refuses values that a header cannot carry. It does not show the value.
func CheckValue(value string) error {
	switch {
	case value == "":
		return errors.New("the value is empty")
	case len(value) > MaxValue:
		return fmt.Errorf("the value has %d bytes; a header has room for %d", len(value), MaxValue)
	case !httpguts.ValidHeaderFieldValue(value), strings.TrimSpace(value) != value:
		return errors.New("the value has a line break, a control character, or spaces at an end, which no header can carry")
	}
	return nil
}

// MaxValue bounds the value of a header.
const MaxValue = 8 << 10

// unambiguous refuses requests whose header different programs would read in
// different ways.
func unambiguous(r Request, name string) error {
	if _, is := r.Trailer[name]; is {
		return fmt.Errorf("%s is announced as a trailer", name)
	}
	for _, line := range r.Header["Connection"] {
		for token := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(token), name) {
				return fmt.Errorf("the header Connection names %s, which takes it out on the way", name)
			}
		}
	}
	for key := range r.Header {
		// CGI and its successors treat both spellings as one header.
		if key != name && strings.EqualFold(strings.ReplaceAll(key, "_", "-"), name) {
			return fmt.Errorf("the header %.80q passes for %s in some servers", key, name)
		}
	}
	return nil
}

// elsewhere refuses a request with a placeholder in a place where no value is
// inserted.
func (h *Host) elsewhere(r Request, substituted map[string]bool) error {
	for _, c := range h.Credentials {
		if strings.Contains(r.Target, c.Placeholder) {
			return fmt.Errorf("the placeholder of %s is in the path or the query, where nothing is put in", c.Secret)
		}
		for key, values := range r.Header {
			for _, value := range values {
				if !substituted[key] && (strings.Contains(value, c.Placeholder) || strings.Contains(key, c.Placeholder)) {
					return fmt.Errorf("the placeholder of %s is in the header %.80q, where nothing is put in: it belongs into %s", c.Secret, key, c.Header)
				}
			}
		}
	}
	return nil
}
