package microvm

import (
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/engine/trust"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
	"golang.org/x/sys/unix"
)

// expectCapture prepares for the longest capture: one that copies all of the memory
// and the disks.
func (s *sandbox) expectCapture() {
	all := s.memory.Size
	for _, size := range s.writable() {
		all += size
	}
	s.Expect(all)
}

// errLie says that the files of a capture contradict the vmm's answer, or are not
// valid.
var errLie = errors.New("what it has saved cannot be")

// verify checks a vmm's answer to Save, and the files that it has written. The files
// in memory are sealed first, since the vmm may still have them open and other
// sandboxes are made from them. The files of the disks stay open in the vmm. They are
// only ever copied, up to the size that they must have. The error is errLie if the
// vmm is to blame.
func (c *captured) verify(answer []byte, memory uint64, disks []uint64) (err error) {
	if err := c.decode(answer, memory, disks); err != nil {
		return err
	}
	if c.held, err = sealed(c.memory.File, memory, memory); err != nil {
		return err
	}
	for i, f := range c.disks {
		want := extent.Total(c.saved.Disks[i].Runs)
		if _, err := checkSize(f, want, want); err != nil {
			return err
		}
	}
	return c.readState()
}

// decode decodes and checks a vmm's answer to Save.
func (c *captured) decode(answer []byte, memory uint64, disks []uint64) error {
	saved, err := vmmctl.UnmarshalSaved(answer)
	if err == nil {
		err = saved.Check(memory, disks)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errLie, err)
	}
	c.saved = saved
	return nil
}

// readState reads the machine's state.
func (c *captured) readState() (err error) {
	if _, err := sealed(c.state, 0, snapshot.MaxState); err != nil {
		return err
	}
	if c.encoded, err = io.ReadAll(io.NewSectionReader(c.state, 0, snapshot.MaxState)); err != nil {
		return fmt.Errorf("read the captured state: %w", err)
	}
	if c.machine, err = vmstate.Unmarshal(c.encoded); err != nil {
		return fmt.Errorf("%w: %w", errLie, err)
	}
	return nil
}

// sealed seals a file in memory that a vmm has written, and then calls checkSize.
func sealed(f *os.File, least, most uint64) (there uint64, err error) {
	if err := trust.Seal(f); err != nil {
		return 0, fmt.Errorf("%w: %w", errLie, err)
	}
	return checkSize(f, least, most)
}

// checkSize checks the length of a file that a vmm has written, and returns how many
// bytes of data it holds, without holes.
func checkSize(f *os.File, least, most uint64) (there uint64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look at %s: %w", f.Name(), err)
	}
	if size := uint64(st.Size); size < least || size > most {
		return 0, fmt.Errorf("%w: %s has %d bytes, not %d to %d", errLie, f.Name(), size, least, most)
	}
	return uint64(st.Blocks) * 512, nil
}
