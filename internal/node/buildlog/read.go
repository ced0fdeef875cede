package buildlog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
)

// chunk is how many bytes are read at once.
const chunk = 32 << 10

// Reader reads a log from an offset on. In place of dropped bytes it inserts a line with
// their number.
type Reader struct {
	log    *Log
	at     int64
	broken bool // the last bytes that were read do not end a line
}

// ReadFrom returns a Reader that begins at an offset. The log may not have reached that
// offset yet.
func (l *Log) ReadFrom(offset int64) *Reader { return &Reader{log: l, at: offset} }

// CopyTo copies the present log, up to an offset at most, to w.
func (r *Reader) CopyTo(w io.Writer, end int64) error {
	buf := make([]byte, chunk)
	for r.at < end {
		n, from, err := r.log.readAt(buf, r.at)
		if err != nil || n == 0 {
			return err
		}
		if from >= end { // all bytes up to end were dropped
			n, from = 0, end
		}
		if from > r.at {
			line := fmt.Sprintf("== %d bytes of the log were left out here, it goes on at byte %d ==\n", from-r.at, from)
			if r.broken {
				line = "\n" + line
			}
			if _, err := io.WriteString(w, line); err != nil {
				return err
			}
			r.at, r.broken = from, false
		}
		if n = int(min(int64(n), end-from)); n == 0 {
			continue
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return err
		}
		r.at += int64(n)
		r.broken = buf[n-1] != '\n'
	}
	return nil
}

// readAt reads from the first kept byte at or after an offset. At the log's end it returns
// no bytes.
func (l *Log) readAt(p []byte, at int64) (n int, from int64, err error) {
	for {
		file, of, err := l.pieceAt(at)
		if file == nil || err != nil {
			return 0, at, err
		}
		// Even if the piece is removed now, it can be read while it is open.
		from = max(at, of.start)
		n, err = file.ReadAt(p[:min(int64(len(p)), of.end()-from)], from-of.start)
		err = errors.Join(ignoreEOF(err), file.Close())
		if n > 0 || err != nil {
			return n, from, err
		}
		at = of.end() // the file is shorter than before
	}
}

func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// pieceAt opens the first piece with bytes at or after an offset. It returns nil if
// there is no such piece.
func (l *Log) pieceAt(at int64) (*os.File, piece, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.pieces {
		if p.end() <= at || p.size == 0 {
			continue
		}
		file, err := os.Open(l.pathOf(p))
		if errors.Is(err, fs.ErrNotExist) && p.start > 0 {
			continue // the log's writer has removed it since the log was opened
		}
		return file, p, err
	}
	return nil, piece{}, nil
}

// LastLines returns the offset at which the last count lines of the kept ones begin.
func (l *Log) LastLines(count int) (int64, error) {
	l.mu.Lock()
	pieces, end := slices.Clone(l.pieces), l.pieces[len(l.pieces)-1].end()
	l.mu.Unlock()
	if count == 0 {
		return end, nil
	}
	buf := make([]byte, chunk)
	for _, p := range slices.Backward(pieces) {
		for to := p.end(); to > p.start; {
			begin := max(p.start, to-chunk)
			part := buf[:to-begin]
			n, from, err := l.readAt(part, begin)
			if err != nil {
				return 0, err
			}
			if from != begin || n < len(part) {
				return from, nil // the piece was removed in the meantime, with all pieces before it
			}
			if to == end {
				part = bytes.TrimSuffix(part, []byte("\n"))
			}
			for i := bytes.LastIndexByte(part, '\n'); i >= 0; i = bytes.LastIndexByte(part[:i], '\n') {
				if count--; count == 0 {
					return begin + int64(i) + 1, nil
				}
			}
			to = begin
		}
	}
	return 0, nil
}
