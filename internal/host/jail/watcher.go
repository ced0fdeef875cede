package jail

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// watcher tells when files are gone: they have no name, and no process has them
// open or mapped any more. The kernel reports that by an inotify event.
type watcher struct {
	mu      sync.Mutex // protects all following fields
	events  *os.File   // nil while no file is watched
	fd      int        // the descriptor of events, whose Fd method would make it blocking
	waiting map[int32][]func()
}

// whenGone calls a function once a file, which is open now, is gone. The kernel may
// still be freeing its pages then.
func (w *watcher) whenGone(f *os.File, then func()) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.events == nil {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			return fmt.Errorf("watch files: make an inotify instance (the sysctl fs.inotify.max_user_instances bounds them): %w", err)
		}
		w.fd, w.events, w.waiting = fd, os.NewFile(uintptr(fd), "inotify"), map[int32][]func(){}
		go w.read(w.events)
	}
	wd, err := unix.InotifyAddWatch(w.fd, "/proc/self/fd/"+strconv.Itoa(int(f.Fd())), unix.IN_DELETE_SELF)
	if err != nil {
		if len(w.waiting) == 0 {
			w.end()
		}
		return fmt.Errorf("watch %s (the sysctl fs.inotify.max_user_watches bounds them): %w", f.Name(), err)
	}
	w.waiting[int32(wd)] = append(w.waiting[int32(wd)], then)
	return nil
}

// Files tells when files that a process was given are gone: they have no name, and
// no process has them open or mapped any more. The zero value is ready for use.
type Files struct{ watcher watcher }

// WhenGone calls a function, on another goroutine, once a file, which is open now,
// is gone.
func (w *Files) WhenGone(f *os.File, then func()) error { return w.watcher.whenGone(f, then) }

// end closes the inotify instance. The caller holds w.mu.
func (w *watcher) end() {
	_ = w.events.Close() // its reader ends
	w.events = nil
}

// read reads the events of an instance until no file is watched.
func (w *watcher) read(events *os.File) {
	buf := make([]byte, 4096) // an event of a file has no name: 16 bytes
	for {
		n, err := events.Read(buf)
		if err != nil {
			w.call(events, nil) // only end closes it, and then the list is empty
			return
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			wd, mask := int32(binary.NativeEndian.Uint32(b)), binary.NativeEndian.Uint32(b[4:])
			b = b[unix.SizeofInotifyEvent:][binary.NativeEndian.Uint32(b[12:]):]
			switch {
			case mask&unix.IN_Q_OVERFLOW != 0: // an event was lost
				w.call(events, nil)
			case mask&unix.IN_DELETE_SELF != 0:
				w.call(events, &wd)
			}
		}
	}
}

// call calls the functions that wait for a file, or for any file if wd is nil.
// Calling them too early does no harm, because no limit is lowered below the memory
// charged.
func (w *watcher) call(events *os.File, wd *int32) {
	var list []func()
	w.mu.Lock()
	if w.events == events {
		for key, functions := range w.waiting {
			if wd == nil || key == *wd {
				list = append(list, functions...)
				delete(w.waiting, key)
			}
		}
		if len(w.waiting) == 0 {
			w.end()
		}
	}
	w.mu.Unlock()
	for _, f := range list {
		f()
	}
}
