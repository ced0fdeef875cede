package rest

import (
	"encoding/base64"
	"encoding/json"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// The forms of an answer.
const (
	formJSON   = "application/json"
	formNDJSON = "application/x-ndjson"
	formSSE    = "text/event-stream"
)

// accepted chooses the form of an answer: the first form of the client's list
// that is offered. A client without a list gets the first offer.
func accepted(r *http.Request, offers ...string) (string, error) {
	wishes := strings.Join(r.Header["Accept"], ",")
	if strings.TrimSpace(wishes) == "" {
		return offers[0], nil
	}
	for wish := range strings.SplitSeq(wishes, ",") {
		kind, _, err := mime.ParseMediaType(wish)
		if err != nil {
			continue
		}
		for _, offer := range offers {
			if kind == offer || kind == "*/*" || kind == strings.Split(offer, "/")[0]+"/*" {
				return offer, nil
			}
		}
	}
	return "", sandbox.Errorf(server.CodeAccept, "no form of the answer is one that the client accepts").
		Try("Accept one of %s", strings.Join(offers, ", "))
}

// flowing is a response that goes to the client in parts, as they are written.
type flowing struct {
	api  *api
	w    http.ResponseWriter
	kind string
}

// begin sends the headers.
func (f *flowing) begin() {
	if began(f.w) {
		return
	}
	h := f.w.Header()
	h.Set("Content-Type", f.kind)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // a proxy must not wait for more
	f.w.WriteHeader(http.StatusOK)
}

func (f *flowing) Write(p []byte) (int, error) {
	f.begin()
	return f.api.send(f.w, p)
}

// events is a stream of JSON objects. It can be used concurrently.
type events struct {
	mu   sync.Mutex // held while an event is written
	out  flowing
	form string
}

func (a *api) newEvents(w http.ResponseWriter, form string) *events {
	return &events{out: flowing{a, w, form}, form: form}
}

// send sends one event; kind is its type.
func (e *events) send(kind string, event any) error { return e.sendAs("", kind, event) }

// sendAs is send for an event with an id, after which browsers can go on. The id
// may be empty.
func (e *events) sendAs(id, kind string, event any) error {
	line, err := json.Marshal(event)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	if e.form == formSSE {
		if kind = "event: " + kind + "\n"; id != "" {
			kind += "id: " + id + "\n"
		}
		line = slices.Concat([]byte(kind+"data: "), line, []byte("\n"))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	_, err = e.out.Write(line)
	return err
}

// encoded returns output in a form that JSON can hold.
func encoded(b []byte) (string, rest.Encoding) {
	if utf8.Valid(b) {
		return string(b), rest.EncodingUtf8
	}
	return base64.StdEncoding.EncodeToString(b), rest.EncodingBase64
}

// decoded is the reverse; an empty encoding means text.
func decoded(field, data string, encoding rest.Encoding) ([]byte, error) {
	switch encoding {
	case "", rest.EncodingUtf8:
		return []byte(data), nil
	case rest.EncodingBase64:
		b, err := base64.StdEncoding.DecodeString(data)
		if err != nil {
			return nil, sandbox.Invalid(field, "it is not base64: %v", err)
		}
		return b, nil
	}
	return nil, sandbox.Invalid(field, "the encoding %q is neither utf-8 nor base64", server.Trimmed(string(encoding)))
}

// output sends the output of a program in events, and does not cut characters
// in two.
type output struct {
	offset int64 // of the first byte of held
	held   []byte
	send   func(offset int64, data string, encoding rest.Encoding) error
}

func (o *output) Write(p []byte) (int, error) {
	all := slices.Concat(o.held, p)
	whole := len(all) - unfinished(all)
	if err := o.emit(all[:whole]); err != nil {
		return 0, err
	}
	o.held = all[whole:]
	return len(p), nil
}

// flush sends the bytes that are held back at the end.
func (o *output) flush() error {
	held := o.held
	o.held = nil
	return o.emit(held)
}

func (o *output) emit(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	data, encoding := encoded(b)
	err := o.send(o.offset, data, encoding)
	o.offset += int64(len(b))
	return err
}

// unfinished is how many bytes at the end are the beginning of a character.
func unfinished(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if tail := b[len(b)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

// capped keeps the beginning of an output, and drops the rest.
type capped struct {
	limit int
	kept  []byte
	cut   bool
}

func (c *capped) Write(p []byte) (int, error) {
	n := min(len(p), c.limit-len(c.kept))
	c.kept = append(c.kept, p[:n]...)
	c.cut = c.cut || n < len(p)
	return len(p), nil
}

// Bounds of each output in a buffered answer.
const (
	defaultOutput = 1 << 20
	maxOutput     = 64 << 20
)

func outputLimit(given *int) (int, error) {
	if given == nil {
		return defaultOutput, nil
	}
	if *given < 0 || *given > maxOutput {
		return 0, sandbox.Invalid("outputLimit", "%d is not between 0 and %d", *given, maxOutput)
	}
	return *given, nil
}
