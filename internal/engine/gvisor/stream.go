package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/gvisorctl"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// streamRoom is the memory that gVisor's kernel and the helper may use while they
// write a checkpoint to pipes: two buffers of 8 MiB in the kernel, and pieces under
// way.
const streamRoom = 48 << 20

// stream writes a sandbox that stands still into a snapshot in the making. The pages
// go through pipes to the disk. No memory but the sandbox's own holds them.
func (s *sandbox) stream(ctx context.Context, b *snapshot.Builder) (state []byte, pages layer.Ref, err error) {
	if s.root == nil {
		<-s.done
		return nil, pages, s.ended()
	}
	s.prepare(ctx)
	back, err := s.group.Extend(streamRoom)
	if err != nil {
		return nil, pages, err
	}
	defer func() { err = errors.Join(err, back()) }()
	var streams []*engine.Stream
	defer func() {
		for _, st := range streams {
			st.Close()
		}
	}()
	var files []*os.File
	for range gvisorctl.CheckpointFiles {
		st, err := engine.NewStream()
		if err != nil {
			return nil, pages, err
		}
		defer st.Until(ctx)()
		streams, files = append(streams, st), append(files, st.Theirs())
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, pages, fmt.Errorf("make a pair of sockets: %w", err)
	}
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "checkpoint"))
	}
	reply, err := s.post(&gvisorctl.Message{Op: gvisorctl.OpStream}, files...)
	for _, f := range files {
		_ = f.Close() // the helper has its own copies
	}
	if err != nil {
		return nil, pages, err
	}
	answer := make(chan *gvisorctl.Message, 1)
	go func() {
		select {
		case r := <-reply:
			for _, st := range streams {
				st.Answered()
			}
			answer <- r
		case <-s.done: // the helper has ended, so nobody writes to the pipes
		}
	}()
	var small [2][]byte
	var readErrs [3]error
	var reading sync.WaitGroup
	for i := range small {
		reading.Go(func() { small[i], readErrs[i] = readSmall(streams[i]) })
	}
	pages, readErrs[2] = b.StreamLayer(ctx, streams[2], s.shape().limits(engine.Limits{}).Memory)
	if readErrs[2] != nil {
		streams[2].Close() // the writer fails, too
	}
	reading.Wait()
	_, err = s.await(ctx, answer)
	if err = errors.Join(err, errors.Join(readErrs[:]...)); errors.Is(err, engine.ErrUnfinished) {
		err = s.condemn(err)
	}
	if err != nil {
		return nil, pages, fmt.Errorf("write the checkpoint: %w", err)
	}
	if pages.Size == 0 {
		return nil, pages, errors.New("write the checkpoint: it has no pages")
	}
	state, err = encodeParts(small[:]...)
	return state, pages, err
}

// readSmall reads one of the two small files, and closes the stream if the file is
// too large.
func readSmall(st *engine.Stream) ([]byte, error) {
	part, err := io.ReadAll(io.LimitReader(st, snapshot.MaxState+1))
	if len(part) > snapshot.MaxState {
		st.Close()
		err = errTooLarge(len(part))
	}
	return part, err
}
