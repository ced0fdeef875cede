package forkd

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// moment is the time at which a daemon is killed: at an event in a folder of its state,
// or at a random time.
type moment struct {
	name   string
	folder string
	event  uint32 // of inotify(7)
	hidden bool   // only names that begin with a dot: unfinished objects
	count  int    // how many of these events must happen; 0 means 1
	within time.Duration
}

// Events in folders.
const (
	begun    = unix.IN_CREATE
	complete = unix.IN_MOVED_TO
	removed  = unix.IN_DELETE | unix.IN_MOVED_FROM // a moved folder is about to be deleted
)

// watch returns a channel that is closed at the moment. The caller must call stop.
func (m moment) watch(t *testing.T, state string) (come <-chan struct{}, stop func()) {
	t.Helper()
	done := make(chan struct{})
	if m.folder == "" {
		timer := time.AfterFunc(time.Duration(rand.Int64N(int64(m.within))), func() { close(done) })
		return done, func() { timer.Stop() }
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, filepath.Join(state, "forkd", m.folder), m.event|unix.IN_ONLYDIR); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b := make([]byte, 64<<10)
		for seen := 0; ; {
			n, err := f.Read(b)
			if err != nil {
				return // stop was called
			}
			for rest := b[:n]; len(rest) >= unix.SizeofInotifyEvent; {
				size := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(rest[12:]))
				name, _, _ := bytes.Cut(rest[unix.SizeofInotifyEvent:size], []byte{0})
				rest = rest[size:]
				if strings.HasPrefix(string(name), ".") != m.hidden {
					continue
				}
				if seen++; seen >= m.count {
					close(done)
					return
				}
			}
		}
	}()
	return done, func() {
		_ = f.Close()
		<-ended
	}
}
