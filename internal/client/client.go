// Package client speaks to a daemon over its REST API, on a Unix socket or over
// HTTPS with an API key. Errors of the daemon are *Error.
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

// Config says where the daemon is: a socket, or a URL and a key.
type Config struct {
	Socket string
	URL    string
	// Key is an API key, or the token of a sandbox. On a socket none is needed.
	Key string
	// CAFile has the certificates that the daemon's is to be signed by, in PEM;
	// empty is those that this machine trusts.
	CAFile string
	// Namespace is that of all calls; empty is default.
	Namespace string
}

// Client makes calls. Its methods are safe for concurrent use.
type Client struct {
	http  *http.Client
	base  string
	key   string
	space string
}

// New makes a client. It connects with the first call.
func New(cfg Config) (*Client, error) {
	c := &Client{base: strings.TrimSuffix(cfg.URL, "/"), key: cfg.Key, space: "/v1/namespaces/default"}
	if cfg.Namespace != "" {
		c.space = "/v1/namespaces/" + url.PathEscape(cfg.Namespace)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	// Many streams may be open at once, all to one host.
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

// Close lets go of connections that nobody uses.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Details are what a daemon says about an error.
type Details = rest.Error

// Error is what a daemon answers if something did not work.
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
	stream       io.Reader // sent as it is
	accept       string
	key          string // for idempotency
}

// maxError bounds what is read of an error.
const maxError = 64 << 10

// send makes a request; the caller closes the body of the answer, which worked.
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

// problem is the error that an answer tells.
func problem(res *http.Response) error {
	e := &Error{Status: res.StatusCode, RequestID: res.Header.Get("X-Request-Id")}
	data, err := io.ReadAll(io.LimitReader(res.Body, maxError))
	if err != nil || json.Unmarshal(data, &e.Details) != nil || e.Code == "" {
		return fmt.Errorf("the daemon answered %s, and nothing that is understood", res.Status)
	}
	return e
}

// get makes a request that is answered with an object.
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

// do makes a request that is answered with nothing.
func (c *Client) do(ctx context.Context, q call) error {
	res, err := c.send(ctx, q)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// ErrCutOff says that a stream ended without its last event. What it is about
// goes on; attach again from where it was.
var ErrCutOff = errors.New("the stream was cut off")

// events makes a request that is answered with a stream, and calls each with
// every event until it returns false, which is the end as it should be.
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
