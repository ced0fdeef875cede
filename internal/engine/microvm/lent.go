package microvm

import (
	"fmt"
	"os"
)

// maxLent bounds the disk files that the captures of a sandbox have lent to its vmm
// and that are still open, for each disk. A vmm can make each such file as long as
// the disk. An honest vmm closes a layer once it is written, and keeps a few top
// files, which it merges.
const maxLent = 16

// refuseLent refuses further captures of a sandbox whose vmm keeps too many files:
// with each capture it could take more of the host's disk.
func (s *sandbox) refuseLent() error {
	if lent := s.Lent(); lent >= maxLent*int64(len(s.writable())) && lent > 0 {
		return fmt.Errorf("the vmm process has not let go of %d files of disks that were handed to it: it cannot be captured any more", lent)
	}
	return nil
}

// lend makes a file on disk for the vmm. The file counts until no process has it
// open.
func (s *sandbox) lend() (*os.File, error) {
	f, err := s.engine.top()
	if err != nil {
		return nil, err
	}
	s.Lend(f, &s.engine.lent)
	return f, nil
}
