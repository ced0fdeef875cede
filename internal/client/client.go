// Package client talks to a daemon over its REST API, on a Unix socket or over
// HTTPS with an API key. Errors of the daemon are of type *Error.
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"

	"agentrun.dev/api/rest"
)

// Config says how to reach the daemon: by a socket, or by a URL and a key.
type Config struct {
	Socket string
	URL    string
	// Key is an API key, or the token of a sandbox. On a socket it is not
	// needed.
	Key string
	// CAFile is a PEM file with the certificates that may sign the daemon's
	// certificate; if it is empty, this machine's trusted ones may.
	CAFile string
	// Namespace is the namespace of all calls; default if it is empty.
	Namespace string
}

// Client makes calls. Its methods are safe for concurrent use.
type Client struct {
	http  *http.Client
	base  string
	key   string
	space string
}

// New makes a client. It connects at the first call.
func New(cfg Config) (*Client, error) {
	c := &Client{base: strings.TrimSuffix(cfg.URL, "/"), key: cfg.Key, space: "/v1/namespaces/default"}
	if cfg.Namespace != "" {
		c.space = "/v1/namespaces/" + url.PathEscape(cfg.Namespace)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	// Many streams may be open at a time, all to one host.
	transport.MaxIdleConnsPerHost = 64
	c.http = &http.Client{Transport: transport}
	if strings.ContainsFunc(cfg.Key, unprintable) {
		return nil, errors.New("the API key has spaces or other characters that no key has")
	}
	if cfg.CAFile != "" {
		pool, err := authorities(cfg.CAFile)
		if err != nil {
			return nil, err
		}
		transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	}
	if cfg.Socket != "" {
		if cfg.URL != "" {
			return nil, errors.New("a daemon has a socket or a URL, not both")
		}
		c.base = "http://localhost"
		transport.Proxy = nil
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", cfg.Socket)
		}
		return c, nil
	}
	u, err := url.Parse(c.base)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("%q is not the http or https URL of a daemon", cfg.URL)
	}
	return c, nil
}

func unprintable(r rune) bool { return r <= ' ' || r > '~' }

// authorities reads the certificates that are trusted instead of this machine's.
func authorities(file string) (*x509.CertPool, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the certificates to trust: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("read the certificates to trust: %s has none in PEM", file)
	}
	return pool, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Details is a daemon's description of an error.
type Details = rest.Error

// Error is a daemon's answer to a call that failed.
type Error struct {
	Details
	Status    int
	RequestID string
}

func (e *Error) Error() string {
	s := e.Message
	if e.Cause != "" {
		s += ": " + e.Cause
	}
	if e.Remediation != "" {
		s += ". " + e.Remediation
	}
	return s
}

// HasCode reports whether err is, or wraps, an Error with this code.
func HasCode(err error, code rest.ErrorCode) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

// call is one request.
type call struct {
	method, path string
	query        url.Values
	body         any       // sent as JSON
	stream       io.Reader // sent unchanged
	accept       string
	key          string // for idempotency
}

// maxError bounds how much of an error is read.
const maxError = 64 << 10

// send makes a request. The answer is always a success; the caller closes its
// body.
func (c *Client) send(ctx context.Context, q call) (*http.Response, error) {
	body, kind := q.stream, "application/octet-stream"
	if q.body != nil {
		data, err := json.Marshal(q.body)
		if err != nil {
			return nil, err
		}
		body, kind = bytes.NewReader(data), "application/json"
	}
	target := c.base + q.path
	if len(q.query) > 0 {
		target += "?" + q.query.Encode()
	}
	r, err := http.NewRequestWithContext(ctx, q.method, target, body)
	if err != nil {
		return nil, err
	}
	for name, value := range map[string]string{"Accept": q.accept, "Idempotency-Key": q.key} {
		if value != "" {
			r.Header.Set(name, value)
		}
	}
	if body != nil {
		r.Header.Set("Content-Type", kind)
	}
	if c.key != "" {
		r.Header.Set("Authorization", "Bearer "+c.key)
	}
	res, err := c.http.Do(r)
	var untrusted x509.UnknownAuthorityError
	if errors.As(err, &untrusted) {
		return nil, fmt.Errorf("speak to the daemon: %w. If it made its certificate itself, name its ca.pem (AGENTRUN_CA_FILE)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("speak to the daemon: %w", err)
	}
	if res.StatusCode < http.StatusBadRequest {
		return res, nil
	}
	defer res.Body.Close()
	return nil, problem(res)
}

// problem returns the error that an answer describes.
func problem(res *http.Response) error {
	e := &Error{Status: res.StatusCode, RequestID: res.Header.Get("X-Request-Id")}
	data, err := io.ReadAll(io.LimitReader(res.Body, maxError))
	if err != nil || json.Unmarshal(data, &e.Details) != nil || e.Code == "" {
		return fmt.Errorf("the daemon answered %s, and nothing that is understood", res.Status)
	}
	return e
}

// get makes a request whose answer is an object.
func get[T any](ctx context.Context, c *Client, q call) (out T, err error) {
	res, err := c.send(ctx, q)
	if err != nil {
		return out, err
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&out); err != nil {
		return out, fmt.Errorf("read the daemon's answer: %w", err)
	}
	return out, nil
}

// do makes a request whose answer has no content.
func (c *Client) do(ctx context.Context, q call) error {
	res, err := c.send(ctx, q)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// ErrCutOff says that a stream ended before its last event. Its subject, such
// as a program, goes on: attach again at the last position.
var ErrCutOff = errors.New("the stream was cut off")

// events makes a request whose answer is a stream, and calls each with every
// event. The stream has ended properly when each returns false.
func events[T any](ctx context.Context, c *Client, q call, each func(T) (more bool, err error)) error {
	q.accept = "application/x-ndjson"
	res, err := c.send(ctx, q)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	dec := json.NewDecoder(res.Body)
	for {
		var event T
		if err := dec.Decode(&event); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("%w: %w", ErrCutOff, err)
		}
		if more, err := each(event); err != nil || !more {
			return err
		}
	}
}
