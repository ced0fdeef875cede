package helper

import (
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/engine/gvisorctl"
	"gvisor.dev/gvisor/runsc/boot"
)

// loading is a restore that has begun and waits. gVisor reads a checkpoint in two
// pieces: its kernel, and the list of pages. Without the list it runs no program and
// copies no page. The list comes through a pipe. Until it is written, the kernel is
// read and stands still.
type loading struct {
	list []byte
	gate *os.File      // the end of the pipe that the list is written to
	done chan struct{} // closed when err is set
	err  error         // of the restore
}

// hold begins a restore that reads the list from a pipe. gate is the other end of the
// pipe. When the restore has ended, the pipe has no reader.
func hold(list []byte, gate *os.File, restore func() error) *loading {
	l := &loading{list: list, gate: gate, done: make(chan struct{})}
	go func() {
		l.err = restore()
		close(l.done)
	}()
	return l
}

// release lets the sandbox run.
func (l *loading) release() error {
	_, err := l.gate.Write(l.list)
	err = errors.Join(err, l.gate.Close())
	<-l.done
	if l.err != nil {
		return l.err // it explains more than the failed write
	}
	return err
}

// abandon makes the restore fail: the list ends before its first byte.
func (l *loading) abandon() error {
	err := l.gate.Close()
	<-l.done
	return errors.Join(err, l.err)
}

var (
	errLoaded      = errors.New("a checkpoint was loaded already: restore it")
	errLoadedWired = errors.New("the network interface comes with the checkpoint, which was loaded before")
)

// load begins to restore a checkpoint. n is nil without a network interface; the
// sandbox cannot get one afterwards.
func (s *sandboxed) load(f runFiles, n *gvisorctl.Network) (err error) {
	files := f.first
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() {
		if err != nil {
			err = fmt.Errorf("load: %w", err)
		}
	}()
	switch {
	case s.running:
		return errRuns
	case s.ahead != nil:
		return errLoaded
	}
	info, err := files[1].Stat()
	if err != nil {
		return err
	}
	list := make([]byte, info.Size())
	if _, err := files[1].ReadAt(list, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	// These stay open until runsc has opened them, which happens after the request.
	state, err := reopen(files[0])
	if err != nil {
		return err
	}
	own := []*os.File{state, nil, nil, nil}
	closeOwn := func() {
		for _, f := range own {
			_ = f.Close() // only read; nil is refused
		}
	}
	var gate *os.File
	if own[2], err = reopen(files[2]); err == nil {
		own[1], gate, err = os.Pipe()
	}
	var links *boot.CreateLinksAndRoutesArgs
	if err == nil && n != nil {
		if own[3], err = reopen(f.wire); err == nil {
			links, err = s.relink(n, own[3], f.host)
		}
	}
	var dir string
	if err == nil {
		dir, err = s.checkpointDir(own)
	}
	if err != nil {
		closeOwn()
		_ = gate.Close() // likewise
		return err
	}
	s.ahead = hold(list, gate, func() error {
		defer closeOwn()
		return s.cont.Restore(s.conf, dir, false, true, links)
	})
	return nil
}

// loaded reports whether a checkpoint was loaded and not restored so far.
func (s *sandboxed) loaded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ahead != nil
}
