// Package audit keeps the log of who did what: lines of JSON that are only ever
// appended, in a file that is rotated by its size. What it cannot write it says,
// so that the caller can refuse what it was about to do.
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

// Stage is which part of a request an event is about.
type Stage string

// The stages. What changes something or reaches into a sandbox is written before
// it is done, and again with its result; what is refused only has an end.
const (
	Start Stage = "start"
	End   Stage = "end"
)

// Event is one line. It has nothing of a request's body, query or headers.
type Event struct {
	Time      time.Time `json:"time"`
	Stage     Stage     `json:"stage"`
	Request   string    `json:"request"`
	Principal string    `json:"principal,omitempty"`
	// Via is the component whose certificate was shown, ROLE:NAME. It has named the
	// principal, if that is another.
	Via       string `json:"via,omitempty"`
	Verb      string `json:"verb,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Object    string `json:"object,omitempty"`
	// Code is the HTTP status, of an End.
	Code   int    `json:"code,omitempty"`
	Remote string `json:"remote"`
	// Essential is an event of somebody who may make room on the disk. While that is full,
	// half of the room that is set aside for the log is for such events alone.
	Essential bool `json:"-"`
	// Omitted is how many requests of the principal, or of strangers, were refused since
	// the event before and not written.
	Omitted int `json:"omitted,omitempty"`
}

// Config says where the log is.
type Config struct {
	Dir string
	// MaxBytes is how large the file gets, Keep how many full ones there are
	// beside it. 0 are 64 MiB and 7.
	// A full one stays in use for as long as the disk has no room for the next.
	MaxBytes int64
	Keep     int
	// Failed is told of what goes wrong while nobody waits for it.
	Failed func(error)
}

const (
	defaultBytes = 64 << 20
	defaultKeep  = 7
	// syncDelay is how long an event may be in the kernel's memory only. A killed
	// daemon loses nothing, a machine that loses power this much.
	syncDelay = time.Second
	fileName  = "audit.log"
	// nextName is the file that the log goes on in after the next rotation.
	nextName = "audit.next"
	// Room that is set aside on the disk for what the log grows by: a thirty-second part
	// of the disk, and no more than 8 MiB.
	asidePart = 32
	mostAside = 8 << 20
)

// ErrFull says that the disk is full, and that what is set aside for the log is for those
// who can make room.
var ErrFull = errors.New("the disk is full, and what is left of the room for the log is for administrators")

// Log is an open log. Its methods are safe for concurrent use.
type Log struct {
	cfg Config

	mu     sync.Mutex // protects all following fields
	file   *os.File
	size   int64
	aside  durable.Aside
	short  bool  // half of that is used up, and the disk has no more
	torn   bool  // a line was written in part
	failed error // of the last sync
	timer  *time.Timer
	closed bool
}

// Open opens the log in a folder, and makes it if there is none.
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

// open opens the file to write to. The caller has the lock.
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

// goOnIn makes a file the one that is written to.
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

// Write appends an event. When it returns nil the event survives whatever
// happens to the process.
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
		// The disk has refused before: this time it is asked.
		l.failed = l.file.Sync()
		return l.failed
	}
	if l.timer == nil {
		l.timer = time.AfterFunc(syncDelay, l.sync)
	}
	return nil
}

// sync is called some time after something was written.
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

// rotate begins a new file, unless the disk has no room for one: the log goes on in the
// file that it has then. One that is cut off in the middle is done again, or leaves a gap
// in the numbers.
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
	// Where the last try came this far, moving files again would lose the oldest.
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
	// What was set aside and not used is given back.
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
