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

// Charged is a file in memory that counts against the limit of the vmm process
// that fills it; the limit is higher until nobody has it open or mapped.
type Charged struct {
	*os.File
	process *Process
	back    func() error
	size    uint64 // by which the limit is higher
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

// Holds says how many bytes are in the file now.
func (c *Charged) Holds(size uint64) error {
	back, err := c.process.cell.Extend(size)
	if err != nil {
		return err
	}
	err = c.back()
	c.back, c.size = back, size
	return err
}

// Close closes the file. The vmm process may still map it: where its guest writes
// all the time, a newer layer is not put in the place of an older one.
func (c *Charged) Close() error {
	return errors.Join(c.process.cell.WhenGone(c.File, c.process.keep(c.size, c.back)), c.File.Close())
}

// ChargedName is that of files which NewCharged makes.
const ChargedName = "memory"

// Mapped lists, by their inodes, the files of NewCharged that a process maps;
// none of one that has ended, or that is not ours to look at and has no limit
// either.
func (p *Process) Mapped() map[uint64]bool {
	maps, err := os.Open("/proc/" + strconv.Itoa(p.Pid()) + "/maps")
	if err != nil {
		return nil
	}
	defer func() { _ = maps.Close() }() // only read
	out := map[uint64]bool{}
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		// Addresses, permissions, offset, device, inode, name.
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

// maxKept is how many times its memory the layers may hold that a vmm still maps
// and nobody else uses. As many layers as a stack has are enough.
const maxKept = layer.MaxLayers

// keep counts a charged file that was closed here until back is called.
func (p *Process) keep(size uint64, back func() error) func() error {
	p.kept.Add(size)
	return func() error {
		p.kept.Add(-size)
		return back()
	}
}

// refuseKept says that a guest with that much memory is not captured any more: its
// vmm could raise its limit with each capture.
func (p *Process) refuseKept(memory uint64) error {
	if kept := p.kept.Load(); kept > maxKept*memory {
		return fmt.Errorf("the vmm process maps %d bytes of layers that nobody else uses, more than %d times its memory: it cannot be captured any more", kept, maxKept)
	}
	return nil
}

// Lend counts a file on disk that the process is given until nobody has it; gone
// watches files.
func (p *Process) Lend(f *os.File, gone *jail.Files) {
	p.lent.Add(1)
	if err := gone.WhenGone(f, func() { p.lent.Add(-1) }); err != nil {
		p.lent.Add(-1) // the machine has no watch left: better uncounted than not captured
	}
}

// Lent is how many files of Lend are not gone.
func (p *Process) Lent() int64 { return p.lent.Load() }
