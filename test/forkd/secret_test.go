package forkd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// asker sends requests to a daemon and keeps every answer.
type asker struct {
	t       *testing.T
	node    *node
	token   string // over TCP, for a principal other than root
	answers *bytes.Buffer
}

func (a *asker) do(want int, method, path string, body any) map[string]any {
	a.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		a.t.Fatal(err)
	}
	host, network, address := "unix", "unix", filepath.Join(a.node.State, "forkd", "socket")
	if a.token != "" {
		v, err := a.node.Client.Version(a.t.Context())
		if err != nil {
			a.t.Fatal(err)
		}
		host, network, address = v.Endpoint, "tcp", v.Endpoint
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, address)
	}}
	req, err := http.NewRequestWithContext(a.t.Context(), method, "http://"+host+"/v1/namespaces/default/"+path, bytes.NewReader(text))
	if err != nil {
		a.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	once := sha256.Sum256(append([]byte(method+path), text...))
	req.Header.Set("Idempotency-Key", hex.EncodeToString(once[:]))
	if a.token != "" {
		req.Header.Set("Authorization", "Bearer "+a.token)
	}
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		a.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }() // it was read to its end
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		a.t.Fatal(err)
	}
	_ = res.Header.Write(a.answers) // a buffer accepts everything
	a.answers.Write(answer)
	if res.StatusCode != want {
		a.t.Fatalf("%s %s: %d %s, want %d", method, path, res.StatusCode, answer, want)
	}
	var out map[string]any
	_ = json.Unmarshal(answer, &out) // some answers have no body
	return out
}

// TestSecretsDoNotLeak takes a value through all operations on sandboxes. Then
// it searches for the value in every answer, in the log, in the process list
// and in all files of the state folder.
func TestSecretsDoNotLeak(t *testing.T) {
	const canary = "sk-live-zW8m2QpX-canary"
	sum := sha256.Sum256([]byte(canary))
	n := newNode(t)
	n.Flags = []string{"-v", "--listen", "127.0.0.1:0", "--insecure-http"}
	t.Cleanup(func() {
		if err := leave(n.State); err != nil {
			t.Error(err)
		}
	})
	n.up()
	t.Cleanup(n.Kill)
	n.template(pythonImage(t))
	root := &asker{t: t, node: n, answers: &bytes.Buffer{}}
	other := &asker{t: t, node: n, answers: root.answers, token: n.key("admin")}

	root.do(200, "PUT", "secrets/llm", map[string]any{"stringData": map[string]string{"API_KEY": canary}})
	root.do(200, "PATCH", "secrets/llm", map[string]any{"data": map[string][]byte{"OTHER": []byte(canary)}})
	root.do(400, "PUT", "secrets/llm", map[string]any{"stringData": map[string]any{"API_KEY": map[string]string{canary: canary}}})
	root.do(400, "PUT", "secrets/llm", map[string]any{canary: canary})
	root.do(400, "PUT", "secrets/llm", map[string]any{"data": map[string]string{"API_KEY": canary + "!"}})
	root.do(400, "PUT", "secrets/llm", map[string]any{"stringData": map[string]string{"API_KEY": strings.Repeat(canary, 5000)}})
	root.do(200, "GET", "secrets", nil)
	root.do(200, "GET", "secrets/llm", nil)

	holder := map[string]any{"name": "holder", "pool": "pool", "secrets": []map[string]string{{"name": "llm", "key": "API_KEY"}, {"name": "llm", "key": "OTHER", "env": "SECOND"}}}
	root.do(201, "POST", "sandboxes", holder)
	root.do(201, "POST", "sandboxes", holder) // again with the same idempotency key
	holds := func(name string) {
		t.Helper()
		for _, variable := range []string{"API_KEY", "SECOND"} {
			code := fmt.Sprintf("import os, hashlib; print(hashlib.sha256(os.environ[%q].encode()).hexdigest())", variable)
			ran := root.do(200, "POST", "sandboxes/"+name+"/execs", map[string]any{"argv": []string{"python3", "-c", code}})
			if got := strings.TrimSpace(fmt.Sprint(ran["stdout"])); got != hex.EncodeToString(sum[:]) {
				t.Fatalf("exec in %s: %s of %v", name, variable, ran)
			}
			ran = root.do(200, "POST", "sandboxes/"+name+"/code", map[string]any{"code": code})
			if got := strings.TrimSpace(fmt.Sprint(ran["stdout"])); got != hex.EncodeToString(sum[:]) {
				t.Fatalf("code in %s: %s of %v", name, variable, ran)
			}
		}
	}
	holds("holder")
	lookForProcesses(t, canary)

	root.do(201, "POST", "sandboxes/holder/forks", map[string]any{"name": "twin", "replicas": 2})
	holds("twin-2")
	denied := other.do(403, "POST", "sandboxes/holder/forks", map[string]any{"name": "theft", "replicas": 1})
	if denied["code"] != "permission_denied" || !strings.Contains(fmt.Sprint(denied["cause"]), "uid:0") || denied["remediation"] == nil {
		t.Errorf("fork by another principal: %v", denied)
	}
	root.do(404, "GET", "forks/theft", nil)
	root.do(404, "POST", "sandboxes", map[string]any{"name": "nope", "pool": "pool", "secrets": []map[string]string{{"name": "llm", "key": "NOPE"}}})
	root.do(400, "POST", "sandboxes", map[string]any{"name": "big", "pool": "pool", "env": map[string]string{"API_KEY": "x"}, "secrets": holder["secrets"]})
	root.do(422, "POST", "sandboxes/holder/execs", map[string]any{"argv": []string{"/no/such/program"}})
	root.do(200, "POST", "sandboxes/holder/code", map[string]any{"code": "1/0"})

	root.do(201, "POST", "sandboxes/holder/checkpoints", map[string]any{"name": "awake"})
	other.do(403, "POST", "sandboxes/holder/checkpoints", map[string]any{"name": "theft"})
	for _, name := range []string{"holder", "twin-1"} {
		root.do(200, "POST", "sandboxes/"+name+"/hibernate", nil)
	}
	root.do(201, "POST", "sandboxes/holder/checkpoints", map[string]any{"name": "asleep"})
	search(t, n.State, canary)
	n.Kill()
	n.up()
	other.answers = root.answers
	holds("holder") // it was woken
	holds("twin-1")
	holds("twin-2") // it ran all the time
	for _, name := range []string{"awake", "asleep"} {
		other.do(403, "POST", "checkpoints/"+name+"/restore", map[string]any{"name": "theft"})
		root.do(201, "POST", "checkpoints/"+name+"/restore", map[string]any{"name": name, "env": map[string]string{"MORE": "1"}})
		holds(name)
	}
	other.do(403, "POST", "sandboxes/holder/forks", map[string]any{"name": "theft", "replicas": 1})
	root.do(201, "POST", "sandboxes/holder/forks", map[string]any{"name": "again", "replicas": 1})
	root.do(200, "POST", "sandboxes/again-1/hibernate", nil)
	root.do(200, "POST", "sandboxes/holder/hibernate", nil)
	search(t, n.State, canary)
	holds("again-1")
	for _, list := range []string{"sandboxes?ended=true", "forks", "pools", "templates", "secrets", "checkpoints"} {
		root.do(200, "GET", list, nil)
	}
	lookForProcesses(t, canary)
	for _, name := range []string{"holder", "twin-1", "twin-2", "again-1", "awake", "asleep"} {
		root.do(200, "DELETE", "sandboxes/"+name, nil)
	}
	search(t, n.State, canary)
	n.down()
	_ = n.Wait() // its log has the result
	search(t, n.State, canary)
	for where, text := range map[string]string{"the answers": root.answers.String(), "the log": n.Log.String()} {
		if spelled := spelledIn([]byte(text), canary); spelled != "" {
			t.Errorf("%s have the secret, as %q", where, spelled)
		}
	}
	if text := n.Log.String(); strings.Count(text, `"holdsSecrets":true`) < 4 || !strings.Contains(text, `"allowed":false`) {
		t.Errorf("the log does not have all forks:\n%s", text)
	}
}

// spelledIn returns the form in which b contains a value, or "".
func spelledIn(b []byte, value string) string {
	for _, form := range []string{value, base64.StdEncoding.EncodeToString([]byte(value)), hex.EncodeToString([]byte(value))} {
		// The last characters of Base64 depend on the bytes that follow.
		if form = strings.TrimRight(form, "="); bytes.Contains(b, []byte(form[:len(form)-1])) {
			return form
		}
	}
	return ""
}

// search looks for a value in all files below a folder.
func search(t *testing.T, dir, value string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && !d.Type().IsRegular() {
			return nil
		}
		if err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a pool has made or removed it meanwhile
		}
		if form := spelledIn(b, value); form != "" {
			t.Errorf("%s has the secret, as %q", path, form)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// lookForProcesses searches for a value in the command lines and environments of
// all processes.
func lookForProcesses(t *testing.T, value string) {
	t.Helper()
	for _, file := range []string{"cmdline", "environ"} {
		found, err := filepath.Glob("/proc/[0-9]*/" + file)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			b, err := os.ReadFile(path)
			if err == nil && strings.Contains(string(b), value) {
				t.Errorf("%s has the secret", path)
			}
		}
	}
}
