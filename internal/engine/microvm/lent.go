package microvm

import (
	"fmt"
	"os"
)

// maxLent is how many files on disk the captures of a sandbox may have handed to its
// vmm, for each disk, that are not gone. A vmm can make each of them as long as the
// disk. One that behaves closes a layer when it is written, and keeps a few tops,
// which it merges.
const maxLent = 16

// refuseLent says that a sandbox is not captured any more: with each capture its
// vmm could take more of the host's disk.
func (s *sandbox) refuseLent() error {
	if lent := s.Lent(); lent >= maxLent*int64(len(s.writable())) && lent > 0 {
		return fmt.Errorf("the vmm process has not let go of %d files of disks that were handed to it: it cannot be captured any more", lent)
	}
	return nil
}

// lend makes a file on disk for the vmm, which counts until nobody has it.
func (s *sandbox) lend() (*os.File, error) {
	f, err := s.engine.top()
	if err != nil {
		return nil, err
	}
	s.Lend(f, &s.engine.lent)
	return f, nil
}
