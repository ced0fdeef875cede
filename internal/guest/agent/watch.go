package agent

import (
	"bytes"
	"encoding/binary"
	"os"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxWatches bounds the folders of one recursive watch.
const maxWatches = 8192

// EventKind is the kind of a change to a watched path.
type EventKind uint8

// The kinds of events.
const (
	EventCreate   EventKind = iota + 1 // made, or found in a new folder
	EventWrite                         // content changed
	EventClose                         // closed after it was open for writing
	EventAttrib                        // mode, owner, times or link count changed
	EventRemove                        // removed
	EventMoveFrom                      // renamed away; Cookie pairs it with a MoveTo
	EventMoveTo                        // renamed to here
	EventOverflow                      // events were lost: look at everything again
	EventGone                          // the watched path itself is gone; the last event
)

// Event is one change below a watched path.
type Event struct {
	Kind   EventKind
	Path   string
	Dir    bool
	Cookie uint32
}

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_ATTRIB | unix.IN_DELETE |
	unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_EXCL_UNLINK

// Watch reports changes of a file or folder. It uses the kernel's own queue
// (fs.inotify.max_queued_events), whose overflow is reported as EventOverflow. So an
// idle watch costs no goroutine and no buffer.
type Watch struct {
	id        *Identity
	root      string
	recursive bool
	file      *os.File
	raw       syscall.RawConn

	reading sync.Mutex       // serialises Next; protects all following fields
	dirs    map[int32]string // watch descriptor to path
	pending []Event          // read or found, and not yet returned
	gone    bool
}

// Watch starts watching path. With recursive it also watches the folders below it,
// including those made later. Files made in a new folder before its watch is in place
// are found by listing the folder. So an EventCreate may come twice, but is never
// missing.
func (f *Files) Watch(path string, recursive bool) (*Watch, error) {
	path, err := checkPath("watch", path)
	if err != nil {
		return nil, err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, failed("watch", path, err)
	}
	w := &Watch{id: &f.id, root: path, recursive: recursive, file: os.NewFile(uintptr(fd), "inotify"),
		dirs: make(map[int32]string, 1)}
	if w.raw, err = w.file.SyscallConn(); err == nil {
		err = w.id.do(func() error { return w.addTree(fd, path, false) })
	}
	if err != nil {
		_ = w.file.Close() // the first error is returned
		return nil, failed("watch", path, err)
	}
	return w, nil
}

// Close frees everything and makes Next return ErrClosed.
func (w *Watch) Close() {
	_ = w.file.Close() // fails only if it is closed already
}

// Next blocks until there are events and returns at least one. It returns
// ErrClosed after Close and after an EventGone.
func (w *Watch) Next() ([]Event, error) {
	w.reading.Lock()
	defer w.reading.Unlock()
	for len(w.pending) == 0 {
		if w.gone {
			return nil, ErrClosed
		}
		if err := w.read(); err != nil {
			return nil, err
		}
	}
	events := w.pending
	w.pending = nil
	return events, nil
}

func (w *Watch) read() error {
	var n int
	var err error
	var buf [4096]byte
	waitErr := w.raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), buf[:])
		return err != syscall.EAGAIN
	})
	switch {
	case waitErr != nil:
		return ErrClosed
	case err == syscall.EINTR:
		return nil
	case err != nil:
		return failed("watch", w.root, err)
	}
	for rest := buf[:n]; len(rest) >= unix.SizeofInotifyEvent && !w.gone; {
		// struct inotify_event: wd, mask, cookie, len, name[len] (inotify(7)).
		wd := int32(binary.NativeEndian.Uint32(rest))
		mask := binary.NativeEndian.Uint32(rest[4:])
		cookie := binary.NativeEndian.Uint32(rest[8:])
		size := int(binary.NativeEndian.Uint32(rest[12:]))
		rest = rest[unix.SizeofInotifyEvent:]
		if size < 0 || size > len(rest) {
			return failed("watch", w.root, syscall.EIO)
		}
		name := rest[:size]
		rest = rest[size:]
		if i := bytes.IndexByte(name, 0); i >= 0 {
			name = name[:i]
		}
		w.handle(wd, mask, cookie, string(name))
	}
	return nil
}

func (w *Watch) handle(wd int32, mask, cookie uint32, name string) {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		w.emit(EventOverflow, w.root, true, 0)
		w.rescan()
		return
	}
	path, ok := w.dirs[wd]
	if !ok {
		return // an event of a watch that was removed
	}
	dir := mask&unix.IN_ISDIR != 0
	isRoot := path == w.root
	if name != "" {
		path = joinPath(path, name)
	}
	switch {
	case mask&unix.IN_IGNORED != 0:
		delete(w.dirs, wd)
		if isRoot {
			w.end(path)
		}
	case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_UNMOUNT) != 0:
		// For a subfolder, its parent's watch reports this.
		if isRoot {
			w.end(path)
		}
	case mask&unix.IN_CREATE != 0:
		w.emit(EventCreate, path, dir, 0)
		w.enter(path, dir)
	case mask&unix.IN_MOVED_TO != 0:
		w.emit(EventMoveTo, path, dir, cookie)
		w.enter(path, dir)
	case mask&unix.IN_MOVED_FROM != 0:
		w.emit(EventMoveFrom, path, dir, cookie)
		if dir {
			w.leave(path)
		}
	case mask&unix.IN_DELETE != 0:
		w.emit(EventRemove, path, dir, 0)
	case mask&unix.IN_MODIFY != 0:
		w.emit(EventWrite, path, dir, 0)
	case mask&unix.IN_CLOSE_WRITE != 0:
		w.emit(EventClose, path, dir, 0)
	case mask&unix.IN_ATTRIB != 0:
		// A subfolder's own watch and its parent's both report it; one event is
		// enough.
		if name != "" || isRoot {
			w.emit(EventAttrib, path, dir, 0)
		}
	}
}

func (w *Watch) emit(kind EventKind, path string, dir bool, cookie uint32) {
	w.pending = append(w.pending, Event{kind, path, dir, cookie})
}

func (w *Watch) end(path string) {
	if !w.gone {
		w.gone = true
		w.emit(EventGone, path, w.recursive, 0)
	}
}

// enter watches a folder that appeared, and reports the files that it already
// contains.
func (w *Watch) enter(path string, dir bool) {
	if dir && w.recursive {
		w.add(path, true)
	}
}

// rescan watches the folders whose creation was lost in an overflow.
func (w *Watch) rescan() {
	if w.recursive {
		w.add(w.root, false)
	}
}

func (w *Watch) add(path string, report bool) {
	var err error
	closed := w.raw.Control(func(fd uintptr) {
		err = w.id.do(func() error { return w.addTree(int(fd), path, report) })
	})
	// A folder that vanished again has its own events. Any other error means that
	// changes in it will be missed.
	if closed == nil && err != nil && err != syscall.ENOENT && err != syscall.ENOTDIR {
		w.emit(EventOverflow, path, true, 0)
	}
}

// leave stops watching a folder that moved away, since its paths are no longer valid.
func (w *Watch) leave(path string) {
	_ = w.raw.Control(func(fd uintptr) { // an error means that the watch is closed
		for wd, p := range w.dirs {
			if p == path || strings.HasPrefix(p, path+"/") {
				_, _ = unix.InotifyRmWatch(int(fd), uint32(wd)) // fails if the folder is gone
				delete(w.dirs, wd)
			}
		}
	})
}

// addTree watches path, and with recursive the folders in it. With report it reports
// everything that it finds, since that may have been made before the watch.
func (w *Watch) addTree(fd int, path string, report bool) error {
	todo := []string{path}
	for len(todo) > 0 {
		at := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		mask := uint32(watchMask)
		if at != w.root {
			mask |= unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW
		}
		if len(w.dirs) >= maxWatches {
			return fail(ErrTooMany, "watch", at, "more than 8192 folders")
		}
		// The watch is added before the folder is listed, so that no change is
		// missed.
		wd, err := unix.InotifyAddWatch(fd, at, mask)
		if err != nil {
			if at == path {
				return err
			}
			continue // it has vanished, or the user may not read it
		}
		w.dirs[int32(wd)] = at
		if !w.recursive {
			return nil
		}
		dir, err := open(unix.AT_FDCWD, at, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			continue // it is a file, or has vanished
		}
		err = eachName(dir, func(name []byte) bool {
			sub := joinPath(at, string(name))
			isDir := w.isFolder(dir, string(name))
			if isDir {
				todo = append(todo, sub)
			}
			if report {
				w.emit(EventCreate, sub, isDir, 0)
			}
			return true
		})
		unix.Close(dir)
		if err != nil && at == path {
			return err
		}
	}
	return nil
}

func (w *Watch) isFolder(dir int, name string) bool {
	var st unix.Stat_t
	return unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && fileType(st.Mode) == TypeDirectory
}
