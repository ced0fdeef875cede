package buildlog

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func open(t *testing.T) *Log {
	t.Helper()
	l, err := Append(filepath.Join(t.TempDir(), "a.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func write(t *testing.T, l *Log, p []byte) {
	t.Helper()
	if n, err := l.Write(p); n != len(p) || err != nil {
		t.Fatalf("wrote %d of %d bytes: %v", n, len(p), err)
	}
}

func read(t *testing.T, l *Log, offset int64) string {
	t.Helper()
	var b strings.Builder
	if err := l.ReadFrom(offset).CopyTo(&b, l.End()); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// lines are numbered, and of different lengths.
func lines(from, to int) []byte {
	var b bytes.Buffer
	for i := from; i < to; i++ {
		fmt.Fprintf(&b, "%d %s\n", i, strings.Repeat("x", i%97))
	}
	return b.Bytes()
}

func onDisk(t *testing.T, l *Log) (bytes int64) {
	t.Helper()
	files, err := Files(l.path)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		bytes += info.Size()
	}
	return bytes
}

// TestHeadAndTail: after any amount of writing, the head and the tail are kept, the file
// system has at most both and a piece, and a reader that comes to the gap learns its size.
func TestHeadAndTail(t *testing.T) {
	l := open(t)
	var all []byte
	for i := 0; len(all) < 5*(Head+Tail); i += 1000 {
		part := lines(i, i+1000)
		write(t, l, part)
		all = append(all, part...)
		if size := onDisk(t, l); size > Head+Tail+pieceSize {
			t.Fatalf("%d bytes are on disk", size)
		}
	}
	if l.End() != int64(len(all)) {
		t.Errorf("%d bytes are counted of %d", l.End(), len(all))
	}
	got := read(t, l, 0)
	head, rest, found := strings.Cut(got, "== ")
	var lost, at int
	if _, err := fmt.Sscanf(rest, "%d bytes of the log were left out here, it goes on at byte %d ==\n", &lost, &at); !found || err != nil {
		t.Fatalf("there is no line about the gap: %v", err)
	}
	if head = strings.TrimSuffix(head, "\n"); head+"\n" != string(all[:Head])+"\n" && head != strings.TrimSuffix(string(all[:Head]), "\n") {
		t.Errorf("the head has %d bytes", len(head))
	}
	_, tail, _ := strings.Cut(rest, "\n")
	if len(tail) < Tail || !bytes.HasSuffix(all, []byte(tail)) || at != len(all)-len(tail) || lost != at-Head {
		t.Errorf("the tail has %d bytes and begins at %d, %d are lost", len(tail), at, lost)
	}
	// From within the gap and from the tail.
	if got := read(t, l, int64(Head+1000)); !strings.HasSuffix(got, tail) || !strings.HasPrefix(got, fmt.Sprintf("== %d bytes", lost-1000)) {
		t.Errorf("from within the gap: %.100q", got)
	}
	if got := read(t, l, l.End()-10); got != string(all[len(all)-10:]) {
		t.Errorf("the last ten bytes: %q", got)
	}
	// The next daemon reads and writes the same log.
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Append(l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	write(t, again, []byte("more\n"))
	if next := read(t, again, 0); next != got+"more\n" {
		t.Errorf("%d bytes, before %d", len(next), len(got))
	}
	if err := Remove(l.path); err != nil || onDisk(t, l) != 0 {
		t.Errorf("%d bytes are left, %v", onDisk(t, l), err)
	}
	if _, err := Open(l.path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("opened what was removed: %v", err)
	}
}

// TestLastLines: the last lines are found across pieces, where a line ends at the end of the
// log and where it does not, and no more are found than are kept.
func TestLastLines(t *testing.T) {
	for _, size := range []int{0, 1, 3, 1000, 10_000, 60_000} {
		for _, end := range []string{"", "unfinished"} {
			l := open(t)
			all := append(lines(0, size), end...)
			write(t, l, all)
			for _, count := range []int{0, 1, 2, 700, 1_000_000} {
				at, err := l.LastLines(count)
				if err != nil {
					t.Fatal(err)
				}
				if count == 1_000_000 {
					if at != 0 {
						t.Errorf("%d lines: all begin at %d", size, at)
					}
					continue
				}
				part := string(all[at:])
				got := strings.Count(strings.TrimSuffix(part, "\n"), "\n") + 1
				if part == "" {
					got = 0
				}
				want := min(count, strings.Count(string(all), "\n")+len(end)/len("unfinished"))
				if got != want || at > 0 && count > 0 && all[at-1] != '\n' {
					t.Errorf("%d lines and %q: the last %d are %d, from byte %d", size, end, count, got, at)
				}
			}
		}
	}
}

// TestFollowed: whoever reads while it is written gets every byte once, or is told how many
// were left out.
func TestFollowed(t *testing.T) {
	l := open(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 300 {
			_, _ = l.Write(lines(i*100, i*100+1+rand.IntN(100)))
		}
	}()
	var got bytes.Buffer
	r := l.ReadFrom(0)
	for ended := false; !ended; {
		grown := l.Grown()
		if err := r.CopyTo(&got, 1<<62); err != nil {
			t.Fatal(err)
		}
		select {
		case <-grown:
		case <-done:
			ended = true
			if err := r.CopyTo(&got, 1<<62); err != nil {
				t.Fatal(err)
			}
		}
	}
	var lost int64
	kept := int64(got.Len())
	for line := range strings.Lines(got.String()) {
		var n, at int64
		if _, err := fmt.Sscanf(line, "== %d bytes of the log were left out here, it goes on at byte %d ==\n", &n, &at); err == nil {
			lost += n
			kept -= int64(len(line))
		}
	}
	// The line about a gap begins a line of its own, which may add a byte.
	if missing := l.End() - lost - kept; missing > 0 || missing < -int64(strings.Count(got.String(), "left out here")) {
		t.Errorf("%d bytes were written, %d read and %d left out", l.End(), kept, lost)
	}
}

// TestForeignFiles: a file whose name is not that of a piece is left alone.
func TestForeignFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.log")
	l, err := Append(path)
	if err != nil {
		t.Fatal(err)
	}
	write(t, l, []byte("x"))
	for _, name := range []string{"a.log.tmp", "a.logs", "b.log", "a.log.0"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("foreign"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	again, err := Open(path)
	if err != nil || read(t, again, 0) != "x" {
		t.Errorf("%v", err)
	}
	if err := errors.Join(l.Close(), Remove(path)); err != nil {
		t.Fatal(err)
	}
	for name, left := range map[string]bool{"a.log": false, "a.log.tmp": true, "a.logs": true, "b.log": true} {
		if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != left {
			t.Errorf("%s: %v", name, err)
		}
	}
}
