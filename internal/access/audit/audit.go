// Package audit keeps the log of requests and their principals: lines of JSON
// that are only ever appended, in a file that is rotated by its size. It reports
// a line that it cannot write, so that the caller can refuse the request before
// it has an effect.
package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"agentrun.dev/internal/durable"
	"golang.org/x/sys/unix"
)

// Stage is the part of a request that an event is about.
type Stage string

// The stages. A request that changes something or reaches into a sandbox is
// written before it is done, and again with its result. A refused request only
// has an end.
const (
	Start Stage = "start"
	End   Stage = "end"
)

// Event is one line. It contains nothing of a request's body, query or headers.
type Event struct {
	Time      time.Time `json:"time"`
	Stage     Stage     `json:"stage"`
	Request   string    `json:"request"`
	Principal string    `json:"principal,omitempty"`
	// Via is the component that has shown its certificate, ROLE:NAME. If the
	// principal is another, Via has named it.
	Via       string `json:"via,omitempty"`
	Verb      string `json:"verb,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Object    string `json:"object,omitempty"`
	// Code is the HTTP status; only an End has it.
	Code   int    `json:"code,omitempty"`
	Remote string `json:"remote"`
	// Essential marks an event of a principal that may free room on the disk. While the
	// disk is full, half of the room that is set aside for the log is for such events
	// alone.
	Essential bool `json:"-"`
	// Omitted is the number of requests of the principal, or of strangers, that were
	// refused but not written since the event before.
	Omitted int `json:"omitted,omitempty"`
}

// Config is the configuration of a log.
type Config struct {
	Dir string
	// MaxBytes is the greatest size of the file, Keep the number of full files
	// beside it. 0 means 64 MiB and 7. A full file stays in use for as long as
	// the disk has no room for the next.
	MaxBytes int64
	Keep     int
	// Failed is called with errors that no caller of Write gets.
	Failed func(error)
}

const (
	defaultBytes = 64 << 20
	defaultKeep  = 7
	// syncDelay is how long an event may be in the kernel's memory only. If the
	// daemon is killed, no event is lost. If the machine loses power, the events
	// of this time are.
	syncDelay = time.Second
	fileName  = "audit.log"
	// nextName is the file that becomes the log at the next rotation.
	nextName = "audit.next"
	// The room that is set aside on the disk for the log to grow: a thirty-second part
	// of the disk, and no more than 8 MiB.
	asidePart = 32
	mostAside = 8 << 20
)

// ErrFull says that the disk is full, and that the rest of the room set aside for the log
// is for principals that can free room.
var ErrFull = errors.New("the disk is full, and what is left of the room for the log is for administrators")

// Log is an open log. Its methods are safe for concurrent use.
type Log struct {
	cfg Config

	mu     sync.Mutex // protects all following fields
	file   *os.File
	size   int64
	aside  durable.Aside
	short  bool  // half of aside is used up, and the disk has no more room
	torn   bool  // a line was written in part
	failed error // of the last sync
	timer  *time.Timer
	closed bool
}

// Open opens the log in a folder, and makes it if it is missing.
func Open(cfg Config) (*Log, error) {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = defaultBytes
	}
	if cfg.Keep == 0 {
		cfg.Keep = defaultKeep
	}
	l := &Log{cfg: cfg}
	err := os.MkdirAll(cfg.Dir, 0o700)
	if err == nil {
		err = l.open()
	}
	if err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	return l, nil
}

func (l *Log) path(n int) string {
	p := filepath.Join(l.cfg.Dir, fileName)
	if n > 0 {
		p += "." + strconv.Itoa(n)
	}
	return p
}

// open opens the file to write to. The caller holds mu.
func (l *Log) open() error {
	f, err := openFile(l.path(0))
	if err != nil {
		return err
	}
	aside, err := asideFor(f)
	if err == nil {
		err = l.goOnIn(f, aside)
	}
	if err == nil {
		l.short, err = l.aside.Keep(f, l.size)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	return nil
}

func openFile(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
}

func asideFor(f *os.File) (durable.Aside, error) {
	most, err := durable.ShareOf(f, asidePart, mostAside)
	return durable.Aside{Most: most}, err
}

// goOnIn makes a file the one that the log writes to.
func (l *Log) goOnIn(f *os.File, aside durable.Aside) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	l.file, l.size, l.aside, l.torn = f, info.Size(), aside, false
	if l.size > 0 { // the machine may have gone down in the middle of a line
		var last [1]byte
		if _, err := f.ReadAt(last[:], l.size-1); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		l.torn = last[0] != '\n'
	}
	return nil
}

// Write appends an event. When it returns nil, the event survives the end of
// the process.
func (l *Log) Write(e Event) error {
	line, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("write the audit log: %w", err)
	}
	line = append(line, '\n')
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.append(line, e.Essential); err != nil {
		return fmt.Errorf("write the audit log: %w", err)
	}
	return nil
}

func (l *Log) append(line []byte, essential bool) (err error) {
	if l.closed {
		return fs.ErrClosed
	}
	if l.size > 0 && l.size+int64(len(line)) > l.cfg.MaxBytes {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	if l.short, err = l.aside.Keep(l.file, l.size); err != nil {
		return err
	}
	if l.short && !essential {
		return ErrFull
	}
	if l.torn {
		line = append([]byte{'\n'}, line...)
	}
	n, err := l.file.Write(line)
	l.size += int64(n)
	if err != nil {
		l.torn = l.torn || n > 0
		return err
	}
	l.torn = false
	if l.failed != nil {
		// The last sync has failed, so this event is synced at once.
		l.failed = l.file.Sync()
		return l.failed
	}
	if l.timer == nil {
		l.timer = time.AfterFunc(syncDelay, l.sync)
	}
	return nil
}

// sync writes the file to disk, syncDelay after an event.
func (l *Log) sync() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer = nil
	if l.closed {
		return
	}
	if l.failed = l.file.Sync(); l.failed != nil && l.cfg.Failed != nil {
		l.cfg.Failed(fmt.Errorf("sync the audit log: %w", l.failed))
	}
}

// rotate begins a new file. If the disk has no room for one, the log goes on in the
// current file. A rotation that is interrupted is done again, or leaves a gap in the
// numbers.
func (l *Log) rotate() (err error) {
	next, err := openFile(filepath.Join(l.cfg.Dir, nextName))
	if err != nil {
		if noRoom(err) {
			return nil
		}
		return err
	}
	defer func() {
		if next != nil {
			err = errors.Join(err, next.Close())
		}
	}()
	aside, err := asideFor(next)
	if err != nil {
		return err
	}
	if short, err := aside.Keep(next, 0); short || err != nil {
		return err
	}
	if err := l.file.Sync(); err != nil {
		return err
	}
	// If the last try came this far, moving files again would lose the oldest.
	if _, err := os.Lstat(l.path(0)); err == nil {
		for n := l.cfg.Keep; n > 0; n-- {
			if err := os.Rename(l.path(n-1), l.path(n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	if err := os.Rename(next.Name(), l.path(0)); err != nil {
		return err
	}
	full, size := l.file, l.size
	if err := l.goOnIn(next, aside); err != nil {
		return err
	}
	next = nil
	// The full file gives back the room that was set aside and not used.
	return errors.Join(full.Truncate(size), full.Close(), durable.SyncFolder(l.cfg.Dir))
}

func noRoom(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// Close writes all to disk and closes the file.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
	}
	return errors.Join(l.file.Sync(), l.file.Close())
}
