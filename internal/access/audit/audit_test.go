package audit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func open(t *testing.T, cfg Config) *Log {
	t.Helper()
	l, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() }) // a test may have broken it
	return l
}

func write(t *testing.T, l *Log, request string) {
	t.Helper()
	if err := l.Write(Event{Stage: End, Request: request, Remote: "unix"}); err != nil {
		t.Fatal(err)
	}
}

// requests reads the lines of a file; a line that is not an event is returned
// as text.
func requests(t *testing.T, path string) (out []string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		var e Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			out = append(out, "!"+lines.Text())
			continue
		}
		out = append(out, e.Request)
	}
	return out
}

func same(t *testing.T, got []string, want ...string) {
	t.Helper()
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%q instead of %q", got, want)
	}
}

// TestAppends: events stay, also those of an earlier daemon, and other users
// cannot read them.
func TestAppends(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	path := filepath.Join(dir, fileName)
	l := open(t, Config{Dir: dir})
	write(t, l, "1")
	same(t, requests(t, path), "1") // at once
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.Write(Event{}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	l = open(t, Config{Dir: dir})
	write(t, l, "2")
	same(t, requests(t, path), "1", "2")
	for name, mode := range map[string]os.FileMode{path: 0o600, dir: 0o700} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%v, %v", info, err)
		}
	}
	// An event is one line, whatever its fields contain.
	if err := l.Write(Event{Request: "a\nb", Object: "\x00\xff\u2028\"}\n{"}); err != nil {
		t.Fatal(err)
	}
	if got := requests(t, path); len(got) != 3 || got[2] != "a\nb" {
		t.Errorf("%q", got)
	}
}

// TestRotates: files have a limit, and so has their number.
func TestRotates(t *testing.T) {
	dir := t.TempDir()
	l := open(t, Config{Dir: dir, MaxBytes: 1000, Keep: 2})
	for i := range 100 {
		write(t, l, strconv.Itoa(100+i))
	}
	found, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(found) != 3 {
		t.Fatalf("%v, %v", found, err)
	}
	var all []string
	for _, name := range []string{".2", ".1", ""} {
		path := filepath.Join(dir, fileName+name)
		info, err := os.Stat(path)
		if err != nil || info.Size() > 1000 || info.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", info, err)
		}
		all = append(all, requests(t, path)...)
	}
	// The newest, all of them, in order.
	for i, r := range all {
		if r != strconv.Itoa(200-len(all)+i) {
			t.Fatalf("%q", all)
		}
	}
	// A rotation that was cut off moves no file a second time.
	last := requests(t, filepath.Join(dir, fileName+".2"))
	if err := os.Rename(filepath.Join(dir, fileName), filepath.Join(dir, "elsewhere")); err != nil {
		t.Fatal(err)
	}
	l.size = 1000
	write(t, l, "after")
	same(t, requests(t, filepath.Join(dir, fileName)), "after")
	same(t, requests(t, filepath.Join(dir, fileName+".2")), last...)
}

// TestTorn: half a line, left when a machine went down, does not spoil the next
// line.
func TestTorn(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, fileName)
	if err := os.WriteFile(path, []byte(`{"request":"whole"}`+"\n"+`{"requ`), 0o600); err != nil {
		t.Fatal(err)
	}
	l := open(t, Config{Dir: dir})
	write(t, l, "next")
	same(t, requests(t, path), "whole", `!{"requ`, "next")
}

// TestFullDisk: an event that cannot be written is an error, and writing goes
// on when there is room.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	l := open(t, Config{Dir: dir})
	write(t, l, "1")
	full, err := os.OpenFile("/dev/full", os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	file := l.file
	l.file = full
	if err := l.Write(Event{Request: "2"}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("%v", err)
	}
	l.file = file
	write(t, l, "3")
	same(t, requests(t, filepath.Join(dir, fileName)), "1", "3")
}

// TestSync: an event is on disk a moment later. A disk that refuses is
// reported, and each further event is synced until the disk accepts one.
func TestSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []error
		l := open(t, Config{Dir: t.TempDir(), Failed: func(err error) { told = append(told, err) }})
		r, w, err := os.Pipe() // which cannot be synced
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		defer w.Close()
		write(t, l, "1")
		file := l.file
		l.mu.Lock()
		l.file = w
		l.mu.Unlock()
		time.Sleep(syncDelay)
		synctest.Wait()
		if len(told) != 1 {
			t.Fatalf("%v", told)
		}
		if err := l.Write(Event{}); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%v", err)
		}
		l.mu.Lock()
		l.file = file
		l.mu.Unlock()
		write(t, l, "2")
		write(t, l, "3")
		time.Sleep(syncDelay)
		synctest.Wait()
		if len(told) != 1 {
			t.Errorf("%v", told)
		}
	})
}

// TestSymlink: a link does not make the log go elsewhere.
func TestSymlink(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink(filepath.Join(t.TempDir(), "other"), filepath.Join(dir, fileName)); err != nil {
		t.Fatal(err)
	}
	if l, err := Open(Config{Dir: dir}); err == nil {
		_ = l.Close()
		t.Error("it was followed")
	}
}

// TestAtOnce: many goroutines write, and every line is whole.
func TestAtOnce(t *testing.T) {
	dir := t.TempDir()
	l := open(t, Config{Dir: dir, MaxBytes: 1 << 12, Keep: 100})
	var all sync.WaitGroup
	for w := range 8 {
		all.Go(func() {
			for i := range 50 {
				if err := l.Write(Event{Request: strconv.Itoa(w*100 + i)}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	seen := map[string]bool{}
	found, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		for _, r := range requests(t, path) {
			seen[r] = true
		}
	}
	if len(seen) != 400 {
		t.Errorf("%d of 400", len(seen))
	}
}

// BenchmarkWrite measures the write that an audited request does twice.
func BenchmarkWrite(b *testing.B) {
	l, err := Open(Config{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	e := Event{Time: time.Now(), Stage: Start, Request: "ABCDEFGHIJKLMNOPQRSTUVWXYZ", Principal: "key:abcdefghijkl", Verb: "exec", Namespace: "default", Object: "sandboxes/worker", Remote: "127.0.0.1:12345"}
	for b.Loop() {
		if err := l.Write(e); err != nil {
			b.Fatal(err)
		}
	}
}
