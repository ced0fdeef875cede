package vmmserver

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"time"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm"
	"agentrun.dev/internal/vmm/disk"
	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/vmmctl"
)

// save writes the VM, as of one instant, to the files of a Save message and
// returns a list of the contents of each layer. A VM that was running continues
// during the copy; a second save waits until the first is complete.
func (s *server) save(m *vmmctl.Save, files []*os.File) (_ []byte, err error) {
	s.saving.Lock()
	defer s.saving.Unlock()
	if s.leave != nil {
		s.leave()
		s.leave = nil
	}
	if want := 3 + 2*len(s.disks); len(files) != want || len(m.Disks) > len(s.disks) {
		return nil, errors.Join(
			fmt.Errorf("save: %d files came, not %d: the page map, the state, the memory, and per layered disk a layer and a top", len(files), want),
			closeAll(files))
	}
	// The goroutines that copy, and the one that answers a waiting vCPU, need
	// Ps besides those of the vCPUs.
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), s.procs+3))
	if s.pagemap == nil {
		s.pagemap = files[0] // lingering captures use it, too
	} else if err := files[0].Close(); err != nil {
		return nil, errors.Join(err, closeAll(files[1:]))
	}
	w := saveFiles{state: files[1], memory: files[2]}
	for i := 3; i < len(files); i += 2 {
		w.layers, w.tops = append(w.layers, files[i]), append(w.tops, files[i+1])
	}
	to := s.saveTo
	if m.Stream {
		to = s.streamTo
	}
	saved, err := to(m, &w)
	if w.memory != nil {
		err = errors.Join(err, w.memory.Close())
	}
	err = errors.Join(err, w.state.Close(), closeAll(w.layers), closeAll(w.tops))
	if err != nil {
		return nil, err
	}
	return saved.Marshal(), nil
}

// saveFiles holds the files of a Save message, except those that have another
// owner by now: a top belongs to its disk once it was frozen, the memory to a
// capture that lingers.
type saveFiles struct {
	state, memory *os.File
	layers, tops  []*os.File
}

func closeAll(files []*os.File) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

func (s *server) saveTo(m *vmmctl.Save, w *saveFiles) (saved vmmctl.Saved, err error) {
	for i, d := range s.disks {
		if err := d.Prepare(w.tops[i]); err != nil {
			return saved, fmt.Errorf("save disk %d: %w", i, err)
		}
	}
	c, err := s.vm.NewCapture(guestmem.CaptureConfig{
		Userfaultfd: s.userfaultfd, Pagemap: s.pagemap, File: w.memory, Patience: guestmem.DefaultPatience,
	})
	if err != nil {
		return saved, err
	}
	kept := false
	defer func() {
		if !kept {
			err = errors.Join(err, c.Close())
		}
	}()
	beside, why := c.Beside()
	var state *vmm.State
	var disks []*disk.Frozen
	stood, err := c.Arm(s.stand)
	if err != nil {
		return saved, err
	}
	pause, err := s.stand(func() (err error) {
		if state, err = s.vm.Save(s.sys); err != nil {
			return err
		}
		if err := c.Begin(); err != nil {
			return err
		}
		if disks, err = s.freezeDisks(w); err != nil {
			return err
		}
		if !beside {
			if saved.Memory, err = saveMemory(c, m.Memory); err != nil {
				return err
			}
		}
		return s.vm.ChangeGenerationID() // last, because the captured memory must hold the old id
	})
	if err != nil {
		return saved, err
	}
	if beside {
		if saved.Memory, err = saveMemory(c, m.Memory); err != nil {
			return saved, err
		}
	}
	if err := saveState(state, w.state); err != nil {
		return saved, err
	}
	for i, d := range disks {
		change, err := saveDisk(m, i, d, w.layers[i])
		if err != nil {
			return saved, err
		}
		saved.Disks = append(saved.Disks, change)
	}
	saved.Stats = c.Stats().Stats
	saved.Pause = max(stood, pause)
	if !beside {
		saved.WhyCopiedInPause = vmmctl.Clip(why.Error())
	}
	if m.Rebase {
		if err := c.Rebase(); err != nil {
			return saved, err
		}
		for _, d := range disks {
			d.Rebase()
		}
		if beside {
			kept = true
			s.linger(c, w.memory)
			w.memory = nil
		}
	}
	return saved, nil
}

// lingerTime is how long memory stays write-protected after a copy is complete.
// Pages that the guest has not written by then are shared with its children.
// Pages that it has written stay its own: if they were shared, its next write
// would copy them again. Such a copy costs a guest several times as much as
// waiting for 2 MiB, and the loss is permanent, because it breaks up a huge page.
const lingerTime = 10 * time.Second

// linger ends a complete capture after lingerTime, when leave is called, or
// when the VM ends.
func (s *server) linger(c *vmm.Capture, file *os.File) {
	hurry, gone := make(chan struct{}), make(chan struct{})
	s.leave = func() { close(hurry); <-gone }
	go func() {
		defer close(gone)
		timer := time.NewTimer(lingerTime)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-hurry:
		case <-s.vm.Done():
		}
		// Pages that could not be shared count as changed.
		if err := errors.Join(c.Share(), c.Close(), file.Close()); err != nil && !errors.Is(err, vmm.ErrEnded) {
			fmt.Fprintln(os.Stderr, "vmm: share memory with forks:", err)
		}
	}()
}

// stand runs do while the guest stands still. No other request can resume the
// guest meanwhile.
func (s *server) stand(do func() error) (stood time.Duration, err error) {
	err = s.still(func() error {
		stood, err = s.vm.Still(do)
		return err
	})
	return stood, err
}

// freezeDisks freezes all disks. The guest stands still, so no device uses
// them.
func (s *server) freezeDisks(w *saveFiles) (disks []*disk.Frozen, err error) {
	for i, d := range s.disks {
		f, err := d.Freeze(w.tops[0])
		w.tops = w.tops[1:]
		if err != nil {
			return nil, fmt.Errorf("save disk %d: %w", i, err)
		}
		disks = append(disks, f)
	}
	return disks, nil
}

// saveDisk writes the changes of a frozen disk relative to its stack.
func saveDisk(m *vmmctl.Save, i int, d *disk.Frozen, to *os.File) (change vmmctl.Change, err error) {
	var include []extent.Run
	if i < len(m.Disks) {
		include = m.Disks[i]
	}
	change.Runs, change.Zeros = d.Changed(include)
	if err := d.WriteChanged(to, change.Runs); err != nil {
		return change, fmt.Errorf("save disk %d: %w", i, err)
	}
	return change, nil
}

func saveState(state *vmm.State, to *os.File) error {
	encoded, err := state.Marshal()
	if err != nil {
		return err
	}
	if _, err := to.WriteAt(encoded, 0); err != nil {
		return fmt.Errorf("save the machine's state: %w", err)
	}
	return nil
}

// minZeroRun is the shortest run of zeros that gets an extent of its own;
// shorter ones are stored like data.
const minZeroRun = 64 << 10

// saveMemory copies the changed memory of a capture into its file.
func saveMemory(from *vmm.Capture, include []extent.Run) (vmmctl.Change, error) {
	c, err := listMemory(from, include)
	if err != nil {
		return c, err
	}
	return c, from.Copy(c.Runs)
}

// listMemory lists the runs of a capture that must be stored, and the runs of
// zeros.
func listMemory(from *vmm.Capture, include []extent.Run) (c vmmctl.Change, err error) {
	data, zeros, err := from.List(include)
	if err != nil {
		return c, err
	}
	for _, z := range zeros {
		if z.Length >= minZeroRun && len(c.Zeros) < layer.MaxRuns {
			c.Zeros = append(c.Zeros, z)
		} else {
			data = append(data, z)
		}
	}
	c.Runs = layer.Gather(extent.Sort(data))
	// If Gather closed a gap, the zeros in it are stored as data.
	c.Zeros = slices.DeleteFunc(c.Zeros, func(z extent.Run) bool {
		return slices.ContainsFunc(c.Runs, func(r extent.Run) bool { return z.Start >= r.Start && z.Start < r.End() })
	})
	return c, nil
}
