package vmmserver

import (
	"errors"
	"fmt"

	"agentrun.dev/internal/vmm/guestmem"
	"agentrun.dev/internal/vmm/vmmctl"
)

// streamTo is saveTo for a Save whose memory and layers are pipes. The guest
// stands still until everything is written, so no page has to be copied first.
func (s *server) streamTo(m *vmmctl.Save, w *saveFiles) (saved vmmctl.Saved, err error) {
	if m.Rebase {
		return saved, errors.New("save: a machine is not rebased on what goes through a pipe")
	}
	for i, d := range s.disks {
		if err := d.Prepare(w.tops[i]); err != nil {
			return saved, fmt.Errorf("save disk %d: %w", i, err)
		}
	}
	c, err := s.vm.NewCapture(guestmem.CaptureConfig{Pagemap: s.pagemap})
	if err != nil {
		return saved, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	stood, err := s.stand(func() error {
		state, err := s.vm.Save(s.sys)
		if err != nil {
			return err
		}
		if err := c.Begin(); err != nil {
			return err
		}
		disks, err := s.freezeDisks(w)
		if err != nil {
			return err
		}
		if err := saveState(state, w.state); err != nil {
			return err
		}
		if saved.Memory, err = listMemory(c, m.Memory); err != nil {
			return err
		}
		err = c.Stream(w.memory, saved.Memory.Runs)
		if err = errors.Join(err, w.memory.Close()); err != nil {
			return err
		}
		w.memory = nil
		for i, d := range disks {
			change, err := saveDisk(m, i, d, w.layers[0])
			if err = errors.Join(err, w.layers[0].Close()); err != nil {
				return err
			}
			w.layers = w.layers[1:]
			saved.Disks = append(saved.Disks, change)
		}
		return s.vm.ChangeGenerationID() // last, as in saveTo: a machine may continue after its checkpoint
	})
	saved.Pause, saved.WhyCopiedInPause = stood, "a sandbox that is written to disk at once stands still"
	return saved, err
}
