package microvm

import (
	"bufio"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// charges are the files in memory that a vmm process has filled and that were
// closed here, but which it still maps: where its guest writes all the time, a
// newer layer is not put in the place of an older one. Its limit stays higher by
// what they hold.
type charges struct {
	mu   sync.Mutex // protects kept
	kept map[uint64]func() error
}

// charged is a file in memory that counts against the limit of the vmm process
// that fills it; the limit is higher until nobody uses it.
type charged struct {
	*os.File
	process *Process
	inode   uint64
	back    func() error
	size    uint64 // by which the limit is higher
}

// newCharged makes a file for at most size bytes. It looks for what has become
// free since the last one.
func (p *Process) newCharged(size uint64) (*charged, error) {
	if err := p.charges.settle(p.mapped()); err != nil {
		return nil, err
	}
	if err := p.refuseKept(size); err != nil {
		return nil, err
	}
	f, err := memoryFile(chargedName, nil)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	back, err := p.cell.Extend(size)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &charged{f, p, st.Ino, back, size}, nil
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

func (c *charged) Close() error {
	err := c.File.Close()
	if c.process.mapped()[c.inode] {
		c.process.charges.keep(c.inode, c.process.keep(c.size, c.back))
		return err
	}
	return errors.Join(err, c.back())
}

func (c *charges) keep(inode uint64, back func() error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kept == nil {
		c.kept = map[uint64]func() error{}
	}
	c.kept[inode] = back
}

// settle lowers the limit by the files that are not mapped any more.
func (c *charges) settle(mapped map[uint64]bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for inode, back := range c.kept {
		if !mapped[inode] {
			delete(c.kept, inode)
			errs = append(errs, back())
		}
	}
	return errors.Join(errs...)
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
