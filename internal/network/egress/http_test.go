package egress

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// webServer is the remote of TestHTTP.
func webServer(t *testing.T) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Method", r.Method)
		_ = http.NewResponseController(w).EnableFullDuplex()
		_, _ = io.Copy(flushing{w}, r.Body)
		for key, values := range r.Trailer {
			w.Header().Set(http.TrailerPrefix+key, "back "+values[0])
		}
	})
	mux.HandleFunc("/headers", func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Content-Type"], w.Header()["Date"] = nil, nil
		_ = r.Header.Write(w)
	})
	mux.HandleFunc("/close", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		_, _ = io.WriteString(w, "bye")
	})
	mux.HandleFunc("/reset", func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
	})
	mux.HandleFunc("/hints", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</style.css>")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		for {
			kind, data, err := conn.Read(r.Context())
			if err != nil {
				return
			}
			if conn.Write(r.Context(), kind, append([]byte("echo "), data...)) != nil {
				return
			}
		}
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Count(r.URL.Path, "/") > 1 { // the mux would redirect to a clean path
			_, _ = io.WriteString(w, r.Host+" "+r.RequestURI)
			return
		}
		if _, pattern := mux.Handler(r); pattern == "" {
			_, _ = io.WriteString(w, r.Host+" "+r.RequestURI)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// flushing flushes each write.
type flushing struct{ http.ResponseWriter }

func (f flushing) Write(b []byte) (int, error) {
	n, err := f.ResponseWriter.Write(b)
	_ = http.NewResponseController(f.ResponseWriter).Flush()
	return n, err
}

// newWeb returns a client whose connections go through a sandbox that may connect to
// allowed.example and second.example on port 80.
func newWeb(t *testing.T) (*world, *Sandbox, *http.Client) {
	w := newWorld(t)
	w.upstream.set("allowed.example. A", addrAllowed)
	w.upstream.set("second.example. A", addrAllowed)
	w.serveHTTP(t, webServer(t), addrAllowed+":80")
	s := w.sandbox(t, allow("allowed.example:80", "second.example:80"))
	resolve(t, s, "allowed.example", "second.example")
	transport := &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return connect(t, s, addrAllowed+":80")
		},
		ExpectContinueTimeout: time.Minute, DisableCompression: true,
	}
	t.Cleanup(transport.CloseIdleConnections)
	return w, s, &http.Client{Transport: transport}
}

func TestHTTP(t *testing.T) {
	w, s, client := newWeb(t)
	const base = "http://allowed.example"
	get := func(t *testing.T, url string) string {
		t.Helper()
		r, err := client.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Body.Close() }()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	t.Run("keep-alive", func(t *testing.T) {
		for i := range 20 {
			uri := fmt.Sprintf("/%%2f//a/../b;c%%41?x=%d;y&&z=%%zz", i)
			if i%2 == 1 {
				uri = "//evil.example/a"
			}
			if got := get(t, base+uri); got != "allowed.example "+uri {
				t.Errorf("got %q, want %q", got, uri)
			}
		}
		w.mu.Lock()
		dials := len(w.dials)
		w.mu.Unlock()
		if dials != 1 {
			t.Errorf("%d connections for 20 requests", dials)
		}
	})
	t.Run("headers", func(t *testing.T) {
		r, err := http.NewRequest(http.MethodGet, base+"/headers", nil)
		if err != nil {
			t.Fatal(err)
		}
		want := http.Header{"X-Forwarded-For": {"1.2.3.4"}, "X-Many": {"a", "b"}, "Cookie": {"a=b"}, "User-Agent": {"test"}}
		r.Header = want.Clone()
		answer, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = answer.Body.Close() }()
		got, err := textproto.NewReader(bufio.NewReader(io.MultiReader(answer.Body, strings.NewReader("\r\n")))).ReadMIMEHeader()
		if err != nil || fmt.Sprint(http.Header(got)) != fmt.Sprint(want) {
			t.Errorf("the server got %v, want %v (%v)", got, want, err)
		}
		answer.Header.Del("Content-Length")
		if len(answer.Header) != 0 {
			t.Errorf("headers were added to the answer: %v", answer.Header)
		}
	})
	t.Run("streams both ways", func(t *testing.T) {
		read, write := io.Pipe()
		r, err := http.NewRequest(http.MethodPost, base+"/echo", read)
		if err != nil {
			t.Fatal(err)
		}
		r.Trailer = http.Header{"X-Sum": {"17"}}
		go func() { _, _ = io.WriteString(write, "first") }()
		answer, err := client.Do(r) // it returns before the request is complete
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = answer.Body.Close() }()
		b := make([]byte, 6)
		if _, err := io.ReadFull(answer.Body, b[:5]); err != nil || string(b[:5]) != "first" {
			t.Fatalf("read %q, %v", b, err)
		}
		_, _ = io.WriteString(write, "second")
		if _, err := io.ReadFull(answer.Body, b); err != nil || string(b) != "second" {
			t.Fatalf("read %q, %v", b, err)
		}
		_ = write.Close()
		if rest, err := io.ReadAll(answer.Body); err != nil || len(rest) != 0 {
			t.Errorf("read %q, %v", rest, err)
		}
		if answer.Trailer.Get("X-Sum") != "back 17" {
			t.Errorf("trailers %v", answer.Trailer)
		}
	})
	t.Run("large", func(t *testing.T) {
		body := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
		answer, err := client.Post(base+"/echo", "", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = answer.Body.Close() }()
		if got, err := io.ReadAll(answer.Body); err != nil || !bytes.Equal(got, body) {
			t.Errorf("%d bytes of %d, %v", len(got), len(body), err)
		}
	})
	t.Run("continue and hints", func(t *testing.T) {
		var codes []int
		trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
			codes = append(codes, code)
			return nil
		}}
		r, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodPost, base+"/echo", strings.NewReader("body"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Expect", "100-continue")
		answer, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := io.ReadAll(answer.Body); string(got) != "body" {
			t.Errorf("got %q", got)
		}
		_ = answer.Body.Close()
		if r, err = http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodGet, base+"/hints", nil); err != nil {
			t.Fatal(err)
		}
		if answer, err = client.Do(r); err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
		if !slices.Contains(codes, 100) || !slices.Contains(codes, 103) {
			t.Errorf("codes %v", codes)
		}
	})
	t.Run("two names on one connection", func(t *testing.T) {
		conn := mustConnect(t, s, addrAllowed+":80")
		_, _ = io.WriteString(conn, "GET /1 HTTP/1.1\r\nHost: allowed.example\r\n\r\nGET /2 HTTP/1.1\r\nHost: SECOND.example:80\r\nConnection: close\r\n\r\n")
		got, err := readAll(conn)
		if err != nil || !strings.Contains(got, "allowed.example /1") || !strings.Contains(got, "SECOND.example:80 /2") {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("HTTP/1.0", func(t *testing.T) {
		conn := mustConnect(t, s, addrAllowed+":80")
		_, _ = io.WriteString(conn, "GET /old HTTP/1.0\r\nHost: allowed.example\r\n\r\n")
		if got, err := readAll(conn); err != nil || !strings.HasSuffix(got, "allowed.example /old") {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("half-close", func(t *testing.T) {
		conn := mustConnect(t, s, addrAllowed+":80")
		_, _ = io.WriteString(conn, "GET /half HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
		_ = conn.CloseWrite()
		if got, err := readAll(conn); err != nil || !strings.HasSuffix(got, "allowed.example /half") {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("absolute form", func(t *testing.T) {
		conn := mustConnect(t, s, addrAllowed+":80")
		_, _ = io.WriteString(conn, "GET http://allowed.example/x HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
		if got, err := readAll(conn); err != nil || !strings.HasSuffix(got, "allowed.example /x") {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("the server closes", func(t *testing.T) {
		conn := mustConnect(t, s, addrAllowed+":80")
		_, _ = io.WriteString(conn, "GET /close HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
		if got, err := readAll(conn); err != nil || !strings.HasSuffix(got, "bye") || !strings.Contains(got, "Connection: close") {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("the server resets", func(t *testing.T) {
		conn := mustConnect(t, s, addrAllowed+":80")
		_, _ = io.WriteString(conn, "GET /reset HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
		if got, err := readAll(conn); err == nil {
			t.Errorf("got %q", got)
		}
		last(t, s, func(e Entry) bool { return e.Outcome == ResetByRemote && e.Name == "allowed.example" })
	})
	t.Run("WebSocket", func(t *testing.T) {
		conn, _, err := websocket.Dial(t.Context(), "ws://allowed.example/ws", &websocket.DialOptions{HTTPClient: client})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			if err := conn.Write(t.Context(), websocket.MessageText, fmt.Append(nil, i)); err != nil {
				t.Fatal(err)
			}
			if _, got, err := conn.Read(t.Context()); err != nil || string(got) != fmt.Sprintf("echo %d", i) {
				t.Fatalf("got %q, %v", got, err)
			}
		}
		_ = conn.Close(websocket.StatusNormalClosure, "")
	})
}

// TestHTTPServerLeaves: an idle connection ends when the server ends it. It also ends
// when the server sends unsolicited bytes, after which nothing can be parsed.
func TestHTTPServerLeaves(t *testing.T) {
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	for name, leave := range map[string]func(net.Conn){
		"by ending": func(net.Conn) {},
		"by unasked bytes": func(conn net.Conn) {
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nunasked")
			<-over
		},
	} {
		t.Run(name, func(t *testing.T) { testServerLeaves(t, leave) })
	}
}

func testServerLeaves(t *testing.T, leave func(net.Conn)) {
	w := newWorld(t)
	w.upstream.set("allowed.example. A", addrAllowed)
	answered := make(chan struct{})
	w.serve(t, func(conn net.Conn) {
		if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
			t.Error(err)
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		<-answered
		leave(conn)
	}, addrAllowed+":80")
	s := w.sandbox(t, allow("allowed.example:80"))
	resolve(t, s, "allowed.example")
	conn := mustConnect(t, s, addrAllowed+":80")
	_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
	r := bufio.NewReader(conn)
	answer, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(answer.Body); string(got) != "ok" || err != nil {
		t.Fatalf("got %q, %v", got, err)
	}
	close(answered)
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	if _, err := r.ReadByte(); err != io.EOF {
		t.Errorf("the connection ended with %v", err)
	}
	if e := last(t, s, func(e Entry) bool { return e.Protocol == "tcp" }); e.Outcome != Closed || e.Name != "allowed.example" {
		t.Errorf("log: %+v", e)
	}
}

// FuzzHTTP sends bytes to port 80 of an allowed name. No server sees another name.
func FuzzHTTP(f *testing.F) {
	w := newWorld(f)
	w.upstream.set("allowed.example. A", addrAllowed)
	hosts := make(chan string, 1000)
	w.serveHTTP(f, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		select {
		case hosts <- r.Host:
		default:
		}
		rw.Header().Set("Connection", "close")
	}), addrAllowed+":80")
	s := w.sandbox(f, allow("allowed.example:80"))
	resolve(f, s, "allowed.example")
	for _, row := range httpAttempts {
		f.Add([]byte(row.request))
	}
	f.Add([]byte("GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		remote, err := s.DialTCP(t.Context(), addrPort("10.255.255.2:1"), addrPort(addrAllowed+":80"))
		if err != nil {
			t.Skip(err) // pins expire in a long run; the next one resolves again
		}
		program, inside := pair(t)
		done := make(chan struct{})
		go func() { defer close(done); remote.Splice(inside) }()
		_, _ = program.Write(raw)
		_ = program.CloseWrite()
		if _, err := readAll(program); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("the connection does not end after its last request")
		}
		_ = program.Close()
		<-done
		for len(hosts) > 0 {
			if host := <-hosts; !strings.EqualFold(strings.TrimSuffix(strings.TrimSuffix(host, ":80"), "."), "allowed.example") {
				t.Errorf("the server was asked for %q", host)
			}
		}
	})
}
