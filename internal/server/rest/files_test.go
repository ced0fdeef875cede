package rest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
)

// TestFiles: written, read, looked at, moved, removed.
func TestFiles(t *testing.T) {
	n := newNode(t)
	n.setUp()
	files := n.claim("a") + "/files"
	at := func(path string, more ...string) string {
		return files + query(append([]string{"path", path}, more...)...)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	if w := as[rest.FileWritten](n.do("PUT", at("sub/big", "mode", "600"), big).ok(200)); w.Written != int64(len(big)) || w.Size != w.Written {
		t.Errorf("%+v", w)
	}
	res := n.do("GET", at(filepath.Join(n.Workdir, "sub", "big")), nil).ok(200)
	if !bytes.Equal(res.body, big) || res.header.Get("Content-Type") != "application/octet-stream" || res.header.Get("Last-Modified") == "" {
		t.Errorf("%d bytes, %v", len(res.body), res.header)
	}
	if part := n.do("GET", at("sub/big", "offset", "17", "length", "3"), nil).ok(200); string(part.body) != "123" {
		t.Errorf("%q", part.body)
	}
	n.do("PUT", at("empty"), []byte{}).ok(200)
	if e := n.do("GET", at("empty"), nil).ok(200); len(e.body) != 0 {
		t.Errorf("%q", e.body)
	}
	n.do("PUT", at("empty", "append", "true"), []byte("a")).ok(200)
	if w := as[rest.FileWritten](n.do("PUT", at("empty", "append", "true"), []byte("b")).ok(200)); w.Written != 1 || w.Size != 2 {
		t.Errorf("%+v", w)
	}
	n.do("PUT", at("empty", "exclusive", "true"), []byte("b")).refused(409, "file_exists")
	i := as[rest.FileInfo](n.do("GET", files+"/stat"+query("path", "sub/big"), nil).ok(200))
	if i.Path != filepath.Join(n.Workdir, "sub", "big") || i.Type != rest.FileTypeFile || i.Mode != "0600" || i.Size != int64(len(big)) || i.Owner != "root" {
		t.Errorf("%+v", i)
	}
	if err := os.Symlink("sub", filepath.Join(n.Workdir, "link")); err != nil {
		t.Fatal(err)
	}
	if i := as[rest.FileInfo](n.do("GET", files+"/stat"+query("path", "link"), nil).ok(200)); i.Type != rest.FileTypeFolder {
		t.Errorf("%+v", i)
	}
	if i := as[rest.FileInfo](n.do("GET", files+"/stat"+query("path", "link", "follow", "false"), nil).ok(200)); i.Type != rest.FileTypeSymlink || i.Target != "sub" {
		t.Errorf("%+v", i)
	}
	n.do("POST", files+"/mkdir", rest.MakeFolder{Path: "x/y/z", Mode: "700"}).ok(204)
	n.do("POST", files+"/mkdir", rest.MakeFolder{Path: "x/y/z"}).ok(204)
	n.do("POST", files+"/mkdir", rest.MakeFolder{Path: "x/y/z", Parents: ptr(false)}).refused(409, "file_exists")
	n.do("POST", files+"/mkdir", rest.MakeFolder{Path: "v", Mode: "9"}).refused(400, "invalid")
	n.do("POST", files+"/move", rest.MoveFile{From: "sub/big", To: "x/big"}).ok(204)
	n.do("POST", files+"/move", rest.MoveFile{From: "empty", To: "x/big"}).refused(409, "file_exists")
	n.do("POST", files+"/move", rest.MoveFile{From: "empty", To: "x/big", Overwrite: true}).ok(204)
	n.do("POST", files+"/move", rest.MoveFile{From: "empty"}).refused(400, "invalid")
	var names []string
	next := ""
	for {
		l := as[rest.FileList](n.do("GET", files+"/list"+query("path", ".", "depth", "3", "limit", "2", "after", next), nil).ok(200))
		for _, f := range l.Items {
			names = append(names, strings.TrimPrefix(f.Path, n.Workdir+"/"))
		}
		if next = l.Next; next == "" {
			break
		}
	}
	if got := strings.Join(names, " "); got != "link sub x x/big x/y x/y/z" {
		t.Errorf("%q", got)
	}
	n.do("DELETE", at("x"), nil).refused(409, "conflict")
	n.do("DELETE", at("x", "recursive", "true"), nil).ok(204)
	n.do("DELETE", at("x"), nil).refused(404, "file_not_found")
	n.do("GET", at("x"), nil).refused(404, "file_not_found")
	n.do("GET", files+"/stat"+query("path", "x"), nil).refused(404, "file_not_found")
	n.do("GET", at("sub"), nil).refused(409, "conflict")
	n.do("GET", files+"/list"+query("path", "sub", "depth", "65"), nil).refused(400, "invalid")
	n.do("PUT", at("f", "mode", "99"), []byte("x")).refused(400, "invalid")
	n.do("GET", at("f", "offset", "-1"), nil).refused(400, "invalid")
	n.do("GET", files, nil).refused(400, "invalid")
	n.do("GET", at(strings.Repeat("x", 5000)), nil).refused(400, "invalid")
	n.do("GET", at("a\x00b"), nil).refused(400, "invalid")
	n.do("GET", at("a\xff"), nil).refused(400, "invalid")
}

// TestUploadCutOff: a file whose upload is cut off is not changed.
func TestUploadCutOff(t *testing.T) {
	n := newNode(t)
	n.setUp()
	files := n.claim("a") + "/files?path=f"
	n.do("PUT", files, []byte("before")).ok(200)
	conn := n.dial()
	_, err := io.WriteString(conn, "PUT "+files+" HTTP/1.1\r\nHost: node\r\nContent-Length: 1000\r\nConnection: close\r\n\r\nbut then")
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	// It answers once it has given up.
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusBadRequest {
		t.Errorf("answered %d", res.StatusCode)
	}
	if got := n.do("GET", files, nil).ok(200); string(got.body) != "before" {
		t.Errorf("%q", got.body)
	}
	n.Eventually(func() bool {
		left, err := os.ReadDir(n.Workdir)
		return err == nil && len(left) == 1
	})
}

// TestWatch: changes come as they happen, until the watched file is gone.
func TestWatch(t *testing.T) {
	n := newNode(t)
	n.setUp()
	files := n.claim("a") + "/files"
	dir := filepath.Join(n.Workdir, "d")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	r := n.request("GET", files+"/watch?path=d", nil)
	res, err := n.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var all bytes.Buffer
	var kinds []string
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		all.WriteString(lines.Text() + "\n")
		var e rest.WatchEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, string(e.Type))
		if e.Type == rest.WatchEventTypeWatching {
			if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		}
	}
	n.conforms(r, &response{t: t, status: res.StatusCode, header: res.Header, body: all.Bytes()})
	got := strings.Join(kinds, " ")
	if !strings.HasPrefix(got, "watching create") || !strings.Contains(got, "remove") || !strings.HasSuffix(got, "gone") {
		t.Errorf("%s", got)
	}
	n.do("GET", files+"/watch?path=none", nil).refused(404, "file_not_found")
	n.do("GET", files+"/watch?path=.", nil, "Accept", "application/json").refused(406, "not_acceptable")
}
