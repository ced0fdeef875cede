package agent

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// expectEvent reads events until one of the kind has come for the path.
func expectEvent(t *testing.T, w *Watch, kind EventKind, path string) Event {
	t.Helper()
	timer := time.AfterFunc(patience, w.Close)
	defer timer.Stop()
	for {
		w.reading.Lock()
		for i, e := range w.pending {
			if e.Kind == kind && e.Path == path {
				w.pending = w.pending[i+1:]
				w.reading.Unlock()
				return e
			}
		}
		w.pending = nil
		w.reading.Unlock()
		events, err := w.Next()
		if err != nil {
			t.Fatalf("waiting for event %d of %s: %v", kind, path, err)
		}
		w.reading.Lock()
		w.pending = append(events, w.pending...)
		w.reading.Unlock()
	}
}

func TestWatch(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	w, err := f.Watch(dir+"/", false)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	os.Mkdir(dir+"/sub", 0o755)
	if e := expectEvent(t, w, EventCreate, dir+"/sub"); !e.Dir {
		t.Errorf("%+v", e)
	}
	writeTestFile(t, dir+"/sub/unseen", "x", 0o600)
	writeTestFile(t, dir+"/f", "x", 0o600)
	if e := expectEvent(t, w, EventCreate, dir+"/f"); e.Dir {
		t.Errorf("%+v", e)
	}
	expectEvent(t, w, EventWrite, dir+"/f")
	expectEvent(t, w, EventClose, dir+"/f")
	os.Chmod(dir+"/f", 0o644)
	expectEvent(t, w, EventAttrib, dir+"/f")
	os.Rename(dir+"/f", dir+"/g")
	from := expectEvent(t, w, EventMoveFrom, dir+"/f")
	to := expectEvent(t, w, EventMoveTo, dir+"/g")
	if from.Cookie == 0 || from.Cookie != to.Cookie {
		t.Errorf("%+v %+v", from, to)
	}
	os.Remove(dir + "/g")
	expectEvent(t, w, EventRemove, dir+"/g")
	os.RemoveAll(dir)
	expectEvent(t, w, EventGone, dir)
	if _, err := w.Next(); err != ErrClosed {
		t.Errorf("after the end: %v", err)
	}
	_, err = f.Watch(dir, true)
	wantKind(t, err, ErrNotFound)
	_, err = f.Watch("relative", true)
	wantKind(t, err, ErrInvalid)
}

func TestWatchOneFile(t *testing.T) {
	f := filesAs(t, "")
	path := writeTestFile(t, openDir(t)+"/file", "x", 0o600)
	w, err := f.Watch(path, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	os.WriteFile(path, []byte("y"), 0o600)
	expectEvent(t, w, EventWrite, path)
	os.Remove(path)
	expectEvent(t, w, EventGone, path)
}

func TestWatchRecursive(t *testing.T) {
	f := filesAs(t, "")
	dir := openDir(t)
	os.MkdirAll(dir+"/old/deep", 0o755)
	w, err := f.Watch(dir, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	writeTestFile(t, dir+"/old/deep/file", "x", 0o600)
	expectEvent(t, w, EventClose, dir+"/old/deep/file")
	// These are made before the agent can have put a watch on the folders.
	os.MkdirAll(dir+"/new/a/b/c", 0o755)
	writeTestFile(t, dir+"/new/a/b/c/raced", "x", 0o600)
	expectEvent(t, w, EventCreate, dir+"/new/a/b/c/raced")
	writeTestFile(t, dir+"/new/a/b/c/later", "x", 0o600)
	expectEvent(t, w, EventClose, dir+"/new/a/b/c/later")
	// A folder moves within the tree: its files have new paths from now on.
	os.Rename(dir+"/new/a", dir+"/old/a")
	expectEvent(t, w, EventMoveTo, dir+"/old/a")
	writeTestFile(t, dir+"/old/a/b/moved", "x", 0o600)
	expectEvent(t, w, EventCreate, dir+"/old/a/b/moved")
	// The folder moves out of the tree, and no more events are reported for it.
	outside := openDir(t)
	os.Rename(dir+"/old/a", outside+"/a")
	expectEvent(t, w, EventMoveFrom, dir+"/old/a")
	writeTestFile(t, outside+"/a/b/gone", "x", 0o600)
	writeTestFile(t, dir+"/last", "x", 0o600)
	expectEvent(t, w, EventCreate, dir+"/last")
	w.reading.Lock()
	if n := len(w.dirs); n != 4 { // dir, old, old/deep, new
		t.Errorf("%d folders watched: %v", n, w.dirs)
	}
	w.reading.Unlock()
	os.RemoveAll(dir + "/old")
	expectEvent(t, w, EventRemove, dir+"/old")
}

func TestWatchOverflow(t *testing.T) {
	b, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	if err != nil {
		t.Fatal(err)
	}
	limit, err := strconv.Atoi(string(b[:len(b)-1]))
	if err != nil || limit > 1<<17 {
		t.Fatalf("%d queued events are too many to try: %v", limit, err)
	}
	f := filesAs(t, "")
	dir := openDir(t)
	w, err := f.Watch(dir, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for i := range limit/2 + 10 {
		name := dir + "/" + strconv.Itoa(i&1)
		os.Symlink("x", name)
		os.Remove(name)
	}
	os.Mkdir(dir+"/lost", 0o755) // no room is left for its event
	expectEvent(t, w, EventOverflow, dir)
	writeTestFile(t, dir+"/lost/file", "x", 0o600)
	expectEvent(t, w, EventCreate, dir+"/lost/file")
}

func TestWatchClose(t *testing.T) {
	f := filesAs(t, "")
	w, err := f.Watch(openDir(t), true)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := w.Next()
		done <- err
	}()
	w.Close()
	w.Close()
	if err := <-done; err != ErrClosed {
		t.Errorf("%v", err)
	}
}
