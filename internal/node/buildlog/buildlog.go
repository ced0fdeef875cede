// Package buildlog keeps the log of a build: its beginning and its end, regardless of how
// much is written between them. A log can be read, and followed, while it is written.
//
// Each byte that was ever written has an offset, which never changes. A log consists of
// one or more files, its pieces. The first has the log's path and the first bytes. The
// path of any other ends with the offset of its first byte. Bytes are dropped by removing
// whole pieces. So a reader that comes to a gap knows its size.
package buildlog

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// A log keeps its first Head bytes and at least its last Tail bytes. On disk it never
// takes more than Head, Tail and one piece.
const (
	Head      = 256 << 10
	Tail      = 768 << 10
	pieceSize = 128 << 10
)

// Log is the log of a build. Its methods are safe for concurrent use.
type Log struct {
	path string

	mu     sync.Mutex // protects all following fields
	pieces []piece    // in the order of their offsets; the first has offset 0
	file   *os.File   // the last piece, if the log is being written
	grown  chan struct{}
}

// piece is one file of a log.
type piece struct{ start, size int64 }

func (p piece) end() int64 { return p.start + p.size }

// Open opens a log to read it.
func Open(path string) (*Log, error) {
	files, err := Files(path)
	if err != nil {
		return nil, err
	}
	l := &Log{path: path, grown: make(chan struct{})}
	for _, file := range files {
		var p piece
		if file != path {
			// If the rest of the name is no offset, the file belongs to
			// something else.
			if p.start, err = strconv.ParseInt(strings.TrimPrefix(file, path+"."), 10, 64); err != nil || p.start <= 0 {
				continue
			}
		}
		info, err := os.Stat(file)
		if err != nil {
			return nil, err
		}
		p.size = info.Size()
		l.pieces = append(l.pieces, p)
	}
	slices.SortFunc(l.pieces, func(a, b piece) int { return cmp.Compare(a.start, b.start) })
	if len(l.pieces) == 0 || l.pieces[0].start != 0 {
		return nil, fmt.Errorf("open log %s: %w", filepath.Base(path), fs.ErrNotExist)
	}
	return l, nil
}

// Append opens a log to continue writing it, and makes it if it does not exist.
func Append(path string) (*Log, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	if err := f.Close(); err != nil {
		return nil, err
	}
	l, err := Open(path)
	if err != nil {
		return nil, err
	}
	last := l.pieces[len(l.pieces)-1]
	l.file, err = os.OpenFile(l.pathOf(last), os.O_WRONLY|os.O_APPEND, 0o600)
	return l, err
}

// Files returns the files of the log of a path, unordered.
func Files(path string) ([]string, error) {
	dir, base := filepath.Split(path)
	entries, err := os.ReadDir(filepath.Clean(dir))
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if Base(e.Name()) == base {
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	return out, nil
}

// Base returns the name of the log that a file in a folder belongs to.
func Base(file string) string {
	if i := strings.LastIndexByte(file, '.'); i >= 0 && strings.Trim(file[i+1:], "0123456789") == "" {
		return file[:i]
	}
	return file
}

// Remove removes a log. It succeeds if the log does not exist.
func Remove(path string) error {
	files, err := Files(path)
	for _, file := range files {
		if removed := os.Remove(file); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}
	return err
}

func (l *Log) pathOf(p piece) string {
	if p.start == 0 {
		return l.path
	}
	return l.path + "." + strconv.FormatInt(p.start, 10)
}

// End is the number of bytes that were ever written to the log.
func (l *Log) End() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pieces[len(l.pieces)-1].end()
}

// Grown returns a channel that is closed by the next write.
func (l *Log) Grown() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.grown
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(p) == 0 {
		return 0, nil
	}
	defer func() {
		close(l.grown)
		l.grown = make(chan struct{})
	}()
	for n < len(p) {
		last := &l.pieces[len(l.pieces)-1]
		room := pieceSize - last.size
		if last.start == 0 {
			room = Head - last.size
		}
		if room <= 0 {
			if err := l.next(); err != nil {
				return n, err
			}
			continue
		}
		wrote, err := l.file.Write(p[n:min(len(p), n+int(room))])
		n += wrote
		last.size += int64(wrote)
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// next begins a piece, and removes pieces that need not be kept any more. The caller
// holds the mutex.
func (l *Log) next() error {
	p := piece{start: l.pieces[len(l.pieces)-1].end()}
	file, err := os.OpenFile(l.pathOf(p), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	err = l.file.Close()
	l.file = file
	l.pieces = append(l.pieces, p)
	for len(l.pieces) > 2 && l.pieces[1].end() <= p.start-Tail {
		err = errors.Join(err, os.Remove(l.pathOf(l.pieces[1])))
		l.pieces = slices.Delete(l.pieces, 1, 2)
	}
	return err
}

// Close ends the writing. The log can still be read.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	return err
}

// Size is the size of the log of a path on disk, in bytes.
func Size(path string) (bytes uint64, err error) {
	files, err := Files(path)
	for _, file := range files {
		info, statErr := os.Stat(file)
		switch {
		case statErr == nil:
			bytes += uint64(info.Size())
		case !errors.Is(statErr, fs.ErrNotExist):
			err = errors.Join(err, statErr)
		}
	}
	return bytes, err
}
