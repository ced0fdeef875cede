package vmmserver

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"agentrun.dev/internal/guestmem"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/vmmctl"
)

// save writes the VM, at one instant, to the files of a Save message and says
// what the layers hold. A VM that was running goes on afterwards.
func (s *server) save(files []*os.File) (reply []byte, err error) {
	defer func() {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
	}()
	if len(files) != 3+len(s.disks) {
		return nil, fmt.Errorf("save: %d files came, not %d: the page map, the state, the memory and one per layered disk", len(files), 3+len(s.disks))
	}
	err = s.still(func() (err error) {
		if !s.vm.Paused() {
			if err := s.vm.Pause(); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, s.vm.Resume()) }()
		}
		reply, err = s.write(files[0], files[1:])
		return err
	})
	return reply, err
}

// write saves a VM that stands still.
func (s *server) write(pagemap *os.File, files []*os.File) ([]byte, error) {
	state, err := s.vm.Save(s.sys)
	if err != nil {
		return nil, err
	}
	encoded, err := state.Marshal()
	if err != nil {
		return nil, err
	}
	if _, err := files[0].WriteAt(encoded, 0); err != nil {
		return nil, fmt.Errorf("save the machine's state: %w", err)
	}
	var saved vmmctl.Saved
	if saved.Memory, err = s.saveMemory(pagemap, files[1]); err != nil {
		return nil, err
	}
	for i, d := range s.disks {
		var c vmmctl.Change
		c.Runs, c.Zeros = d.Changed()
		if err := d.WriteChanged(files[2+i], c.Runs); err != nil {
			return nil, fmt.Errorf("save disk: %w", err)
		}
		saved.Disks = append(saved.Disks, c)
	}
	return saved.Marshal(), nil
}

// minZeroRun is the least run of zeros that is worth an extent of its own;
// shorter ones are stored like data.
const minZeroRun = 64 << 10

func (s *server) saveMemory(pagemap, out *os.File) (c vmmctl.Change, err error) {
	data, zeros, err := s.vm.ChangedMemory(pagemap)
	if err != nil {
		return c, err
	}
	runs := toRuns(data)
	for _, z := range toRuns(zeros) {
		if z.Length >= minZeroRun && len(c.Zeros) < layer.MaxRuns {
			c.Zeros = append(c.Zeros, z)
		} else {
			runs = append(runs, z)
		}
	}
	slices.SortFunc(runs, func(a, b layer.Run) int {
		if a.Start < b.Start {
			return -1
		}
		return 1
	})
	c.Runs = layer.Coalesce(runs, layer.MaxRuns)
	// Zeros in a gap that was closed are stored with it.
	c.Zeros = slices.DeleteFunc(c.Zeros, func(z layer.Run) bool {
		return slices.ContainsFunc(c.Runs, func(r layer.Run) bool { return z.Start >= r.Start && z.Start < r.Start+r.Length })
	})
	spans := make([]guestmem.Span, len(c.Runs))
	for i, r := range c.Runs {
		spans[i] = guestmem.Span{Start: r.Start, Length: r.Length}
	}
	return c, s.vm.WriteMemory(out, spans)
}

func toRuns(spans []guestmem.Span) []layer.Run {
	runs := make([]layer.Run, len(spans))
	for i, s := range spans {
		runs[i] = layer.Run{Start: s.Start, Length: s.Length}
	}
	return runs
}
