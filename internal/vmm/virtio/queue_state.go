package virtio

import (
	"fmt"

	"agentrun.dev/internal/vmm/guestmem"
)

// QueueState is the state of a Queue between two requests. The buffers
// themselves are in guest memory.
type QueueState struct {
	Size      uint16
	Ready     bool
	Desc      uint64
	Avail     uint64
	Used      uint64
	NextAvail uint16
	NextUsed  uint16
}

func (q *Queue) save() QueueState {
	return QueueState{
		Size: q.size, Ready: q.ready,
		Desc: q.desc, Avail: q.avail, Used: q.used,
		NextAvail: q.nextAvail, NextUsed: q.nextUsed,
	}
}

// restoreQueue makes a queue from a state, which may come from a damaged file.
// So a ready queue is checked like one that a driver enables.
func restoreQueue(mem *guestmem.Memory, maxSize uint16, indirect bool, s QueueState) (*Queue, error) {
	q := newQueue(mem, maxSize)
	q.size, q.ready, q.indirect = s.Size, s.Ready, indirect
	q.desc, q.avail, q.used = s.Desc, s.Avail, s.Used
	q.nextAvail, q.nextUsed = s.NextAvail, s.NextUsed
	if q.ready {
		if err := q.check(); err != nil {
			return nil, fmt.Errorf("restore queue: %w", err)
		}
	}
	return q, nil
}
