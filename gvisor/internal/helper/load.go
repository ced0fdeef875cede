package helper

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// loading is a restore that has begun and waits. runsc reads a checkpoint in two
// pieces: gVisor's kernel, and the list of pages, without which it runs no
// program. The list comes through a pipe: until it is written, the kernel is read,
// but nothing runs, and no page is copied.
type loading struct {
	list []byte
	gate *os.File      // the pipe's end that the list is written to
	done chan struct{} // closed when err is set
	err  error         // of the restore
}

var errLoadedWithout = errors.New("restore: the checkpoint was loaded without a network interface")

// load begins to restore a checkpoint. The sandbox's network is a loopback: an
// interface cannot be given to it any more.
func (s *sandboxed) load(files []*os.File) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running || s.ahead != nil {
		return errors.New("load: the sandbox runs already, or was loaded")
	}
	const listAt = 1 // in gvisorctl.CheckpointFiles
	info, err := files[listAt].Stat()
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	l := &loading{list: make([]byte, info.Size()), done: make(chan struct{})}
	if _, err := files[listAt].ReadAt(l.list, 0); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("load: read the list of pages: %w", err)
	}
	// They outlive the request: runsc opens them again.
	var own []*os.File
	closeOwn := func() {
		for _, f := range own {
			_ = f.Close() // only read
		}
	}
	for i, f := range files {
		if i == listAt {
			if f, l.gate, err = os.Pipe(); err != nil {
				break
			}
		} else if f, err = reopen(f); err != nil {
			break
		}
		own = append(own, f)
	}
	var dir string
	if err == nil {
		dir, err = s.checkpointDir(own)
	}
	if err != nil {
		closeOwn()
		if l.gate != nil {
			err = errors.Join(err, l.gate.Close())
		}
		return fmt.Errorf("load: %w", err)
	}
	go func() {
		defer close(l.done)
		defer closeOwn()
		l.err = s.cont.Restore(s.conf, dir, false, true, nil)
	}()
	s.ahead = l
	return nil
}

// loaded reports whether a checkpoint was loaded and not yet restored.
func (s *sandboxed) loaded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ahead != nil
}

// release lets the sandbox run.
func (l *loading) release() error {
	_, err := l.gate.Write(l.list)
	err = errors.Join(err, l.gate.Close())
	<-l.done
	if l.err != nil {
		return l.err // that it has not read the list says less
	}
	return err
}

// abandon has the restore fail: the list ends before it has begun.
func (l *loading) abandon() error {
	err := l.gate.Close()
	<-l.done
	return errors.Join(err, l.err)
}
