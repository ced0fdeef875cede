package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/bench"
)

var update = flag.Bool("update", false, "write the golden files")

// golden compares with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it):\n%s", path, got)
	}
}

func TestReport(t *testing.T) {
	b, err := os.ReadFile("testdata/report.json")
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := r.Print(&out); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.txt", out.String())
	svg := r.SVG()
	golden(t, "report.svg", svg)
	wellFormed(t, svg)
	wellFormed(t, Report{Columns: []Column{{Peer: "<&>", Way: "none", Failed: "x"}}}.SVG())
}

func wellFormed(t *testing.T, svg string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
	}
}

// TestColumn: the source's numbers appear once, and a failure appears.
func TestColumn(t *testing.T) {
	e := entrant{
		peer: Microsandbox, columns: []string{"fork", "restore"}, failed: errors.New("fork: broken"),
		boots: []time.Duration{time.Second}, execs: []time.Duration{time.Millisecond},
		forks: [][]forked{
			{{running: 1e6, answered: 2e6, executed: 3e6, ownAfterAnswer: 4096, ownAfterExec: 8192}, {answered: 7e6, renewed: 8e6}},
		},
	}
	one := func(ms float64) bench.Summary { return bench.Summary{N: 1, P10: ms, P50: ms, P90: ms, P99: ms} }
	want := []Column{
		{
			Peer: Microsandbox, Way: "fork", Failed: "fork: broken", Boot: one(1000), Exec: one(1),
			Running: one(1), Answered: one(2), Executed: one(3), OwnAfterAnswer: 4096, OwnAfterExec: 8192,
		},
		{Peer: Microsandbox, Way: "restore", Failed: "fork: broken", Running: one(0), Answered: one(7), Renewed: one(8), Executed: one(0)},
	}
	for i, w := range want {
		if got := e.column(i); got != w {
			t.Errorf("column %d is\n%+v, want\n%+v", i, got, w)
		}
	}
}

// TestOurs: each number is compared with that of the same way to fork.
func TestOurs(t *testing.T) {
	ms := func(x float64) bench.Summary { return bench.Summary{N: 1, P50: x} }
	r := Report{Columns: []Column{
		{Peer: AgentRun, Way: newProcess, Boot: ms(1), Answered: ms(2)},
		{Peer: AgentRun, Way: waitingProcess, Answered: ms(3)},
		{Peer: Firecracker, Way: waitingProcess, Boot: ms(4), Answered: ms(5)},
	}}
	boot := measure{of: func(c Column) bench.Summary { return c.Boot }}
	answered := measure{of: func(c Column) bench.Summary { return c.Answered }}
	for _, c := range []struct {
		m    measure
		way  string
		want float64
	}{
		{answered, newProcess, 2}, {answered, waitingProcess, 3}, {answered, "restore", 2},
		{boot, waitingProcess, 1}, {measure{of: func(c Column) bench.Summary { return c.Live }}, newProcess, 0},
	} {
		if got := r.ours(c.m, c.way).P50; got != c.want {
			t.Errorf("%s: %v, want %v", c.way, got, c.want)
		}
	}
}

func TestParseAnswer(t *testing.T) {
	var a forkAnswer
	if err := parseAnswer([]byte(`{"result": {"returned_ms": 1.5, "answered_ms": 2, "executed_ms": 3, "own_after_answer_kib": 4, "own_after_exec_kib": 5}}`), &a); err != nil {
		t.Fatal(err)
	}
	if want := (forkAnswer{1.5, 2, 3, 4, 5}); a != want {
		t.Errorf("got %+v, want %+v", a, want)
	}
	if err := parseAnswer([]byte(`{"result": {}}`), nil); err != nil {
		t.Error(err)
	}
	for line, want := range map[string]string{
		`{"error": "KVMError: no"}`:            "KVMError: no",
		`{}`:                                   "neither",
		`Traceback (most recent call last):`:   "Traceback",
		`{"result": {"returned_ms": "a lot"}}`: "a lot",
	} {
		if err := parseAnswer([]byte(line), &a); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", line, err, want)
		}
	}
}

// TestDriver: the driver's messages when it cannot run, with and without the package,
// and when it has ended.
func TestDriver(t *testing.T) {
	d, err := startDriver("python3")
	if err != nil {
		t.Fatal(err)
	}
	if err := d.call(t.Context(), request{Op: "load"}, nil); err == nil || !strings.Contains(err.Error(), "Error: ") {
		t.Errorf("a load of nothing: %v", err)
	}
	if err := d.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := d.call(t.Context(), request{Op: "boot"}, nil); err == nil || !strings.Contains(err.Error(), "the driver ended") {
		t.Errorf("after its end: %v", err)
	}
	if err := d.close(); err != nil {
		t.Errorf("close a driver that has ended: %v", err)
	}
	if _, err := startDriver("/nonexistent/python"); err == nil {
		t.Error("an interpreter that is not there was started")
	}
}

// TestDriverHangs: a driver that does not answer is ended, and the step is named.
func TestDriverHangs(t *testing.T) {
	silent := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(silent, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	d, err := startDriver(silent)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errStepLimit)
	if err := d.call(ctx, request{Op: "load"}, nil); !errors.Is(err, errStepLimit) {
		t.Errorf("error %v", err)
	}
	if err := d.close(); err != nil {
		t.Errorf("close a driver that was killed: %v", err)
	}
}

func TestUnavailable(t *testing.T) {
	for _, c := range []struct {
		s    subject
		want string
	}{
		{&microsandbox{}, "make bench-peers"},
		{&microsandbox{cfg: Config{Python: "python3"}}, "folder"},
		{&firecracker{}, "--firecracker"},
		{&firecracker{cfg: Config{Firecracker: "/nonexistent/firecracker"}}, "/nonexistent/firecracker"},
		{&firecracker{cfg: Config{Firecracker: "/bin/false"}}, "exit status 1"},
	} {
		if err := c.s.open(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%T: error %v, want one with %q", c.s, err, c.want)
		}
		if err := c.s.close(); err != nil {
			t.Errorf("%T: close: %v", c.s, err)
		}
	}
}

// TestFirecrackerEnds: a binary that starts and ends is reported with the reason.
func TestFirecrackerEnds(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "firecracker")
	if err := os.WriteFile(binary, []byte("#!/bin/sh\necho no KVM here; exit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	f := &firecracker{cfg: Config{Firecracker: binary}, memory: t.TempDir()}
	if _, err := f.boot(t.Context()); err == nil || !strings.Contains(err.Error(), "no KVM here") {
		t.Errorf("error %v", err)
	}
	if left, err := os.ReadDir(f.memory); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// TestFirecrackerCall: requests of Firecracker's interface and its refusals.
func TestFirecrackerCall(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var asked []string
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		asked = append(asked, r.Method+" "+r.URL.Path+" "+string(body))
		if r.URL.Path == "/vsock" {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"fault_message": "no such thing"}`)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})}
	go func() { _ = server.Serve(l) }() // ends with Close
	defer func() { _ = server.Close() }()
	p := &fcProcess{client: &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
	}}}}
	if err := p.call(t.Context(), http.MethodPut, "/actions", object{"action_type": "InstanceStart"}); err != nil {
		t.Error(err)
	}
	if err := p.call(t.Context(), http.MethodPut, "/vsock", object{}); err == nil || !strings.Contains(err.Error(), "no such thing") {
		t.Errorf("a refusal: %v", err)
	}
	if want := `PUT /actions {"action_type":"InstanceStart"}`; len(asked) != 2 || asked[0] != want {
		t.Errorf("asked %q, want %q first", asked, want)
	}
}

// TestConnectVsock: Firecracker's line is read, and no byte after it.
func TestConnectVsock(t *testing.T) {
	for answer, good := range map[string]bool{"OK 1073741824\nhello": true, "": false, "NO\n": false} {
		conn := &scripted{in: strings.NewReader(answer)}
		err := connectVsock(conn, 1024)
		if (err == nil) != good {
			t.Errorf("%q: %v", answer, err)
		}
		if conn.out.String() != "CONNECT 1024\n" {
			t.Errorf("said %q", conn.out.String())
		}
		if rest, _ := io.ReadAll(conn.in); good && string(rest) != "hello" {
			t.Errorf("the guest's first bytes are %q", rest)
		}
	}
}

type scripted struct {
	in  *strings.Reader
	out bytes.Buffer
}

func (s *scripted) Read(p []byte) (int, error)  { return s.in.Read(p) }
func (s *scripted) Write(p []byte) (int, error) { return s.out.Write(p) }
