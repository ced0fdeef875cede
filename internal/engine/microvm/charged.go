package microvm

import (
	"bufio"
	"errors"
	"os"
	"strconv"
	"strings"
)

// charged is a file in memory that counts against the limit of the vmm process
// that fills it; the limit is higher until nobody has it open or mapped.
type charged struct {
	*os.File
	process *Process
	back    func() error
	size    uint64 // by which the limit is higher
}

// newCharged makes a file for at most size bytes.
func (p *Process) newCharged(size uint64) (*charged, error) {
	if err := p.refuseKept(size); err != nil {
		return nil, err
	}
	f, err := memoryFile(chargedName, nil)
	if err != nil {
		return nil, err
	}
	back, err := p.cell.Extend(size)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &charged{f, p, back, size}, nil
}

// holds says how many bytes are in the file now.
func (c *charged) holds(size uint64) error {
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
func (c *charged) Close() error {
	return errors.Join(c.process.cell.WhenGone(c.File, c.process.keep(c.size, c.back)), c.File.Close())
}

// chargedName is that of files which newCharged makes.
const chargedName = "memory"

// mapped lists, by their inodes, the files of newCharged that a process maps;
// none of one that has ended, or that is not ours to look at and has no limit
// either.
func (p *Process) mapped() map[uint64]bool {
	maps, err := os.Open("/proc/" + strconv.Itoa(p.Pid()) + "/maps")
	if err != nil {
		return nil
	}
	defer func() { _ = maps.Close() }() // only read
	out := map[uint64]bool{}
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		// Addresses, permissions, offset, device, inode, name.
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || !strings.HasPrefix(fields[5], "/memfd:"+chargedName) {
			continue
		}
		if inode, err := strconv.ParseUint(fields[4], 10, 64); err == nil {
			out[inode] = true
		}
	}
	return out
}
