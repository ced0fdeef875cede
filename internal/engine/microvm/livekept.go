package microvm

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/layer"
	"golang.org/x/sys/unix"
)

// LiveImages is what memory and disks of a sandbox are made of that was forked
// from a running one: layers of its snapshot, and live layers. Of these its
// process has the only descriptors and mappings when its maker is gone.
type LiveImages struct {
	Memory layer.Image   `json:"memory"`
	Disks  []layer.Image `json:"disks"`
	Held   []HeldLayer   `json:"held"`
}

// HeldLayer is a live layer and the file that it is in.
type HeldLayer struct {
	Digest layer.Digest `json:"digest"`
	Device uint64       `json:"device"`
	Inode  uint64       `json:"inode"`
	Bytes  uint64       `json:"bytes"`
}

// DescribeLive describes a sandbox for a later Attach; nil if it has no live
// layers.
func DescribeLive(sb engine.Sandbox) (*LiveImages, error) {
	s, ok := sb.(*sandbox)
	if !ok {
		return nil, fmt.Errorf("describe: %T is no microVM", sb)
	}
	s.capture.Lock()
	defer s.capture.Unlock()
	if len(s.live) == 0 {
		return nil, nil
	}
	out := &LiveImages{Memory: s.memory}
	for i := range s.disks {
		out.Disks = append(out.Disks, s.disks[i].image)
	}
	for digest, l := range s.live {
		var st unix.Stat_t
		if err := unix.Fstat(int(l.file.Fd()), &st); err != nil {
			return nil, fmt.Errorf("describe: %w", err)
		}
		out.Held = append(out.Held, HeldLayer{Digest: digest, Device: st.Dev, Inode: st.Ino, Bytes: l.holds})
	}
	return out, nil
}

// adopt makes a sandbox that was described by its snapshot one that has live
// layers.
func (s *sandbox) adopt(l *LiveImages) error {
	if l.Memory.Size != s.memory.Size || len(l.Disks) != len(s.disks) {
		return errors.New("it does not fit the snapshot that it is based on")
	}
	known := map[layer.Digest]bool{}
	for _, ref := range s.memory.Layers {
		known[ref.Digest] = true
	}
	live := liveLayers{}
	for _, h := range l.Held {
		known[h.Digest] = true
		live[h.Digest] = &liveLayer{users: 1, holds: h.Bytes, held: h, close: func() error { return nil }}
	}
	for i, im := range append([]layer.Image{l.Memory}, l.Disks...) {
		if i > 0 {
			if im.Size != s.disks[i-1].image.Size {
				return errors.New("a disk does not fit the snapshot that it is based on")
			}
			for _, ref := range s.disks[i-1].image.Layers {
				known[ref.Digest] = true
			}
		}
		if err := im.Validate(); err != nil {
			return err
		}
		for _, ref := range im.Layers {
			if !known[ref.Digest] {
				return fmt.Errorf("layer %s is nowhere", ref.Digest)
			}
		}
	}
	s.live = live
	s.setMemory(l.Memory)
	for i := range s.disks {
		s.disks[i].image = l.Disks[i]
	}
	return nil
}

// findLive opens the live layers that only the sandbox's process has. It reports
// whether all are there: a guest may have given back all that it had of one, and
// not every user may look into the process.
func (s *sandbox) findLive() bool {
	found := true
	for _, l := range s.live {
		if l.file != nil {
			continue
		}
		f, err := heldFile(s.Pid(), l.held)
		if err != nil {
			found = false
			continue
		}
		l.file, l.close = f, f.Close
	}
	return found
}

// heldFile opens a file that a process has open or mapped.
func heldFile(pid int, h HeldLayer) (*os.File, error) {
	proc := "/proc/" + strconv.Itoa(pid)
	paths, err := filepath.Glob(proc + "/fd/*")
	if err != nil {
		return nil, err
	}
	maps, err := os.Open(proc + "/maps")
	if err != nil {
		return nil, err
	}
	defer func() { _ = maps.Close() }() // only read
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		// Addresses, permissions, offset, device, inode, name.
		fields := strings.Fields(lines.Text())
		if len(fields) > 5 && fields[4] == strconv.FormatUint(h.Inode, 10) {
			paths = append(paths, proc+"/map_files/"+fields[0])
		}
	}
	for _, path := range paths {
		if f, err := h.open(path); err == nil {
			return f, nil
		}
	}
	return nil, fmt.Errorf("layer %s: process %d has it no more", h.Digest, pid)
}

// open opens a path if it leads to the layer's file.
func (h HeldLayer) open(path string) (*os.File, error) {
	var st unix.Stat_t
	// Not every file of a process may be opened without an effect.
	if err := unix.Stat(path, &st); err != nil || st.Ino != h.Inode || st.Dev != h.Device || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, errors.Join(os.ErrNotExist, err)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Ino != h.Inode || st.Dev != h.Device {
		return nil, errors.Join(os.ErrNotExist, err, f.Close())
	}
	return f, nil
}

// leave closes the files of live layers that the sandbox's process goes on
// using: what they hold stays in memory.
func (l liveLayers) leave() error {
	var errs []error
	for _, x := range l {
		errs = append(errs, x.drop(func() error {
			if x.file == nil {
				return nil
			}
			return x.file.Close()
		}))
	}
	return errors.Join(errs...)
}
