package rest

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path"
	"sync"
	"time"

	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// maxAnswerHeader bounds the headers of a program's answer.
const maxAnswerHeader = 256 << 10

// sandboxPolicy keeps pages of programs out of the daemon's origin, which all
// pages share if ports are reached by path. With this policy, the scripts of a
// page have no origin. Host names have an origin for each port.
const sandboxPolicy = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"

// servePort passes a request on to a program in a sandbox, and its answer back.
// Both are streams, and a connection that becomes another protocol stays open
// for as long as both want it. All the while the sandbox is in use.
func (a *api) servePort(w *recorder, r *http.Request, to *portTarget) {
	if to.path == "" && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		addSlash(w, r, to)
		return
	}
	target, err := to.url(r.URL)
	var k sandbox.Key
	if err == nil {
		k, err = to.key(r.Context(), a.Service)
	}
	var u *server.Session
	if err == nil {
		u, err = a.Use(r.Context(), k)
	}
	if err != nil {
		a.fail(w, r, err)
		return
	}
	defer u.Close()
	ctx, end := u.Begin(r.Context(), sandbox.OpPort)
	var failed error
	defer func() { end(failed) }()
	r = r.WithContext(ctx)
	body := &proxyBody{api: a, w: w, from: r.Body}
	defer body.leave()
	if r.Body != http.NoBody {
		r.Body = body
		// Otherwise net/http drops the rest of the body once the answer begins.
		_ = http.NewResponseController(w).EnableFullDuplex() // of HTTP/1; HTTP/2 always is
	}
	conns := &portConns{use: u, port: to.port}
	defer conns.close()
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { to.rewrite(p, target, w.Header().Get("X-Request-Id")) },
		Transport:     conns.transport(),
		FlushInterval: -1, // a program that streams wants each part sent at once
		ErrorLog:      slog.NewLogLogger(a.Log.Handler(), slog.LevelDebug),
		ModifyResponse: func(res *http.Response) error {
			if res.StatusCode == http.StatusSwitchingProtocols {
				w.status = res.StatusCode // the proxy writes it past the recorder
			}
			if to.prefix != "" {
				res.Header.Add("Content-Security-Policy", sandboxPolicy)
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, r *http.Request, err error) {
			failed = body.blame(to.explain(err, k.Name))
			a.fail(w, r, failed)
		},
	}
	proxy.ServeHTTP(&stallWriter{ResponseWriter: w, patience: a.StallTimeout}, r)
}

// addSlash redirects a client to the path with a slash, where relative links
// work.
func addSlash(w http.ResponseWriter, r *http.Request, to *portTarget) {
	location := path.Base(to.prefix) + "/" // relative: other proxies may be in front of us
	if r.URL.RawQuery != "" {
		location += "?" + r.URL.RawQuery
	}
	w.Header().Set("Location", location)
	w.WriteHeader(http.StatusPermanentRedirect)
}

// rewrite makes the request to the program from the client's. net/http has
// removed the headers that concern only one connection.
func (to *portTarget) rewrite(p *httputil.ProxyRequest, target *url.URL, requestID string) {
	p.Out.URL = target
	p.Out.Host = to.authority()
	if to.prefix == "" {
		// Pages compare their origin with Host.
		p.Out.Host = p.In.Host
	}
	p.SetXForwarded()
	h := p.Out.Header
	for _, name := range []string{"Authorization", accessHeader, "X-Forwarded-Prefix"} {
		h.Del(name)
	}
	withoutDaemonCookies(h)
	if to.prefix != "" {
		h.Set("X-Forwarded-Prefix", to.prefix)
	}
	h.Set("X-Request-Id", requestID)
}

// explain says what a client can do about a request that a program did not
// answer.
func (to *portTarget) explain(err error, name sandbox.Name) error {
	var own *sandbox.Error
	if errors.As(err, &own) || errors.Is(err, context.Canceled) {
		return err
	}
	return sandbox.Errorf(server.CodeUnavailable, "what listens on port %d of sandbox %s gave no answer of HTTP", to.port, name).
		Because("%s", server.Trimmed(err.Error())).Try("See whether it is the right port, and whether its server is well")
}

// portConns are the connections that one request needs: one, and another if a
// program closes the first. They end with the request, because a connection
// that waits for the next request would keep the sandbox in use.
type portConns struct {
	use  sandbox.Session
	port uint16

	mu   sync.Mutex // protects all following fields
	open []sandbox.Conn
	over bool
}

func (p *portConns) transport() *http.Transport {
	return &http.Transport{
		DialContext:            p.dial,
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxAnswerHeader,
		ExpectContinueTimeout:  time.Second,
	}
}

func (p *portConns) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	c, err := p.use.Connect(ctx, p.port)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		_ = c.Close() // never fails
		return nil, errRequestOver
	}
	p.open = append(p.open, c)
	return portConn{c}, nil
}

func (p *portConns) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	for _, c := range p.open {
		_ = c.Close() // never fails
	}
}

// portConn is a connection to a port in the form that net/http wants. It has no
// deadlines; net/http closes connections that must end.
type portConn struct{ sandbox.Conn }

func (portConn) LocalAddr() net.Addr              { return portAddr{} }
func (portConn) RemoteAddr() net.Addr             { return portAddr{} }
func (portConn) SetDeadline(time.Time) error      { return errors.ErrUnsupported }
func (portConn) SetReadDeadline(time.Time) error  { return errors.ErrUnsupported }
func (portConn) SetWriteDeadline(time.Time) error { return errors.ErrUnsupported }

type portAddr struct{}

func (portAddr) Network() string { return "sandbox" }
func (portAddr) String() string  { return "sandbox" }

// stallWriter is an answer whose client must receive each part within a time
// limit. A program that sends nothing for long is no fault of the client's.
type stallWriter struct {
	http.ResponseWriter
	patience time.Duration
}

func (w *stallWriter) Write(p []byte) (int, error) {
	w.extend()
	return w.ResponseWriter.Write(p)
}

// FlushError is for http.ResponseController.
func (w *stallWriter) FlushError() error {
	w.extend()
	return http.NewResponseController(w.ResponseWriter).Flush()
}

func (w *stallWriter) extend() {
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(w.patience)) // see send
}

// Unwrap is for http.ResponseController.
func (w *stallWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// proxyBody is the body that a client sends to a program; the client may not
// stall. The reader of the body may outlive the request.
type proxyBody struct {
	api  *api
	w    http.ResponseWriter
	from io.ReadCloser

	mu   sync.Mutex // protects all following fields
	left bool       // the request is over
	err  error      // of the client
}

var errRequestOver = errors.New("the request is over")

func (b *proxyBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	if b.left {
		b.mu.Unlock()
		return 0, errRequestOver
	}
	c := http.NewResponseController(b.w)
	_ = c.SetReadDeadline(time.Now().Add(b.api.StallTimeout)) // see send
	b.mu.Unlock()
	n, err := b.from.Read(p)
	if err == nil {
		return n, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.left {
		// Otherwise the deadline would end the request while it is answered.
		_ = c.SetReadDeadline(time.Time{})
	}
	if !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}

// Close implements io.Closer.
func (b *proxyBody) Close() error { return b.from.Close() }

// leave is called when the request is over: the connection may be used for
// another one.
func (b *proxyBody) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = true
	c := http.NewResponseController(b.w)
	_ = c.SetReadDeadline(time.Time{})
	_ = c.SetWriteDeadline(time.Time{})
}

// blame returns the client's error where there is one.
func (b *proxyBody) blame(err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil {
		return bodyError(b.err, 0)
	}
	return err
}
