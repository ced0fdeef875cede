package process

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/storage/layer"
)

// Charged is a file in memory that is charged to the vmm process that fills it. The
// process's limit is raised by the size of the file until no process has it open or
// mapped.
type Charged struct {
	*os.File
	process *Process
	back    func() error
	size    uint64 // how far the limit is raised
}

// NewCharged makes a file for at most size bytes.
func (p *Process) NewCharged(size uint64) (*Charged, error) {
	if err := p.refuseKept(size); err != nil {
		return nil, err
	}
	f, err := MemoryFile(ChargedName, nil)
	if err != nil {
		return nil, err
	}
	back, err := p.cell.Extend(size)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Charged{f, p, back, size}, nil
}

// Holds sets how many bytes are in the file now, and adjusts the limit to that.
func (c *Charged) Holds(size uint64) error {
	back, err := c.process.cell.Extend(size)
	if err != nil {
		return err
	}
	err = c.back()
	c.back, c.size = back, size
	return err
}

// Close closes the file here. The vmm process may still map it: where its guest
// writes all the time, a newer layer does not replace an older one.
func (c *Charged) Close() error {
	return errors.Join(c.process.cell.WhenGone(c.File, c.process.keep(c.size, c.back)), c.File.Close())
}

// ChargedName is the name of the files that NewCharged makes.
const ChargedName = "memory"

// Mapped lists the inodes of the NewCharged files that the process maps. The list is
// empty if the process has ended. It is also empty if we may not read the process's
// maps, and such a process has no limit to restore.
func (p *Process) Mapped() map[uint64]bool {
	maps, err := os.Open("/proc/" + strconv.Itoa(p.Pid()) + "/maps")
	if err != nil {
		return nil
	}
	defer func() { _ = maps.Close() }() // only read
	out := map[uint64]bool{}
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		// The fields are: addresses, permissions, offset, device, inode, name.
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || !strings.HasPrefix(fields[5], "/memfd:"+ChargedName) {
			continue
		}
		if inode, err := strconv.ParseUint(fields[4], 10, 64); err == nil {
			out[inode] = true
		}
	}
	return out
}

// maxKept bounds the layers that a vmm still maps after all other users have gone, as
// a multiple of its guest's memory. As many layers as a stack may have are enough.
const maxKept = layer.MaxLayers

// keep counts a charged file that was closed here, until back is called.
func (p *Process) keep(size uint64, back func() error) func() error {
	p.kept.Add(size)
	return func() error {
		p.kept.Add(-size)
		return back()
	}
}

// refuseKept refuses further captures of a guest whose vmm maps too many unused
// layers: with each capture it could raise its limit.
func (p *Process) refuseKept(memory uint64) error {
	if kept := p.kept.Load(); kept > maxKept*memory {
		return fmt.Errorf("the vmm process maps %d bytes of layers that nobody else uses, more than %d times its memory: it cannot be captured any more", kept, maxKept)
	}
	return nil
}

// Lend counts a file on disk that the process is given, until no process has it open.
// gone watches files.
func (p *Process) Lend(f *os.File, gone *jail.Files) {
	p.lent.Add(1)
	if err := gone.WhenGone(f, func() { p.lent.Add(-1) }); err != nil {
		p.lent.Add(-1) // the machine has no watches left; an uncounted file is better than a failed capture
	}
}

// Lent is how many lent files are still open.
func (p *Process) Lent() int64 { return p.lent.Load() }
