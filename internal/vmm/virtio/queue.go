package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"agentrun.dev/internal/vmm/guestmem"
)

// Descriptor flags, virtio 1.2 §2.7.5.
const (
	descNext     = 1
	descWrite    = 2
	descIndirect = 4
)

// availNoInterrupt is VIRTQ_AVAIL_F_NO_INTERRUPT, §2.7.6, usedNoNotify is
// VIRTQ_USED_F_NO_NOTIFY, §2.7.8.
const (
	availNoInterrupt = 1
	usedNoNotify     = 1
)

// Sizes of the parts of a split virtqueue, §2.7.
const (
	descSize     = 16
	ringHeader   = 4 // flags and idx
	availElem    = 2
	usedElem     = 8
	eventTrailer = 2 // used_event or avail_event, laid out but not used
	idxOffset    = 2
)

// ErrQueue means that a guest broke the rules of a virtqueue. The device that
// owns the queue stands still until the driver resets it.
var ErrQueue = errors.New("malformed virtqueue")

// Queue is the device's side of a split virtqueue (virtio 1.2 §2.7).
//
// VIRTIO_F_EVENT_IDX is not offered. It adds two moving thresholds that must
// survive snapshots, to save notifications that are rare here by design:
// devices complete inline, vsock and net announce sent packets lazily, Linux
// masks interrupts through the flags while it works on a ring, and net masks
// notifications through them.
//
// A Queue has no lock of its own. The transport writes the registers while the
// queue is not in use; afterwards the device's lock protects it.
type Queue struct {
	mem *guestmem.Memory
	max uint16 // largest size the driver may choose

	size     uint16
	ready    bool
	indirect bool // VIRTIO_F_INDIRECT_DESC was negotiated
	desc     uint64
	avail    uint64
	used     uint64

	nextAvail uint16 // next entry of the avail ring to take, free running
	nextUsed  uint16 // next entry of the used ring to fill, free running

	ranges []guestmem.Range // backs the chain that Pop returned last
	raw    [descSize]byte   // a descriptor or a used element in transit
}

// Chain is one buffer that the driver made available: the driver wrote Readable
// for the device, the device fills Writable. Both are valid until the next Pop,
// and the device may cut them up in place.
type Chain struct {
	Head     uint16
	Readable []guestmem.Range
	Writable []guestmem.Range
	// slots counts the descriptors of the ring that the chain occupies; an
	// indirect table takes one, no matter how long it is.
	slots uint16
}

func newQueue(mem *guestmem.Memory, maxSize uint16) *Queue {
	return &Queue{mem: mem, max: maxSize, size: maxSize}
}

// reset clears all settings of the driver.
func (q *Queue) reset() {
	*q = Queue{mem: q.mem, max: q.max, size: q.max, ranges: q.ranges[:0]}
}

// check validates the registers that the driver wrote: §2.7 for the alignments,
// §2.7.1 and §4.2.2.2 for the size.
func (q *Queue) check() error {
	n := uint64(q.size)
	switch {
	case n == 0 || n&(n-1) != 0 || q.size > q.max:
		return fmt.Errorf("%w: size %d (at most %d, a power of two)", ErrQueue, n, q.max)
	case q.desc%16 != 0 || q.avail%2 != 0 || q.used%4 != 0:
		return fmt.Errorf("%w: misaligned ring (desc %#x, avail %#x, used %#x)", ErrQueue, q.desc, q.avail, q.used)
	case !q.mem.Contains(q.desc, descSize*n),
		!q.mem.Contains(q.avail, ringHeader+availElem*n+eventTrailer),
		!q.mem.Contains(q.used, ringHeader+usedElem*n+eventTrailer):
		return fmt.Errorf("%w: ring outside memory (desc %#x, avail %#x, used %#x)", ErrQueue, q.desc, q.avail, q.used)
	}
	return nil
}

// Pop takes the next buffer of the avail ring (§2.7.6). ok is false if there is
// no buffer or the queue is not ready. An error wraps ErrQueue and leaves the
// position in the ring unchanged.
func (q *Queue) Pop() (c Chain, ok bool, err error) {
	if !q.ready {
		return Chain{}, false, nil
	}
	idx, err := q.availIndex()
	if err != nil {
		return Chain{}, false, err
	}
	pending := idx - q.nextAvail
	if pending == 0 {
		return Chain{}, false, nil
	}
	if pending > q.size {
		return Chain{}, false, fmt.Errorf("%w: avail index jumped from %d to %d in a ring of %d", ErrQueue, q.nextAvail, idx, q.size)
	}
	// The acquire load of the index above orders this read after it.
	slot := uint64(q.nextAvail % q.size)
	head, err := q.mem.LoadUint16(q.avail + ringHeader + availElem*slot)
	if err != nil {
		return Chain{}, false, fmt.Errorf("%w: read avail ring: %w", ErrQueue, err)
	}
	if c, err = q.walk(head); err != nil {
		return Chain{}, false, err
	}
	q.nextAvail++
	return c, true, nil
}

// Unpop puts back, unused, the buffer that Pop returned last. No other Pop may
// be in between. To put back the last n buffers, call it n times.
func (q *Queue) Unpop() { q.nextAvail-- }

// more reports whether Pop would find a buffer, or an error.
func (q *Queue) more() bool {
	if !q.ready {
		return false
	}
	idx, err := q.availIndex()
	return err != nil || idx != q.nextAvail
}

// notify tells the driver whether to notify the device of buffers (§2.7.10). It is only
// a hint: a driver may notify in any case. After asking for notifications the caller
// must look at the ring once more, for buffers that the driver added before it saw the
// request (§2.7.10.1). notify returns whether it changed the flag. It writes to guest
// memory only then, because a fork shares a page with its source until it writes to the
// page.
func (q *Queue) notify(wanted bool) (changed bool, err error) {
	if !q.ready {
		return false, nil
	}
	var flags uint16
	if !wanted {
		flags = usedNoNotify
	}
	old, err := q.mem.LoadUint16(q.used)
	if err != nil {
		return false, fmt.Errorf("%w: read used flags: %w", ErrQueue, err)
	}
	if old == flags {
		return false, nil
	}
	if err := q.mem.StoreUint16(q.used, flags); err != nil {
		return false, fmt.Errorf("%w: write used flags: %w", ErrQueue, err)
	}
	return true, nil
}

// availIndex is the driver's free-running position in the avail ring.
func (q *Queue) availIndex() (uint16, error) {
	idx, err := q.mem.LoadUint16(q.avail + idxOffset)
	if err != nil {
		return 0, fmt.Errorf("%w: read avail index: %w", ErrQueue, err)
	}
	return idx, nil
}

// walk follows a descriptor chain. Each descriptor is read once. The number of
// descriptors is bounded by the queue size (§2.7.5.3.1), which also ends loops.
func (q *Queue) walk(head uint16) (Chain, error) {
	c := Chain{Head: head}
	q.ranges = q.ranges[:0]
	var (
		table      = q.desc
		entries    = uint32(q.size)
		index      = uint32(head)
		inIndirect bool
		writing    bool
		readable   int
		total      uint64
	)
	for seen := uint16(0); ; {
		if index >= entries {
			return Chain{}, fmt.Errorf("%w: descriptor %d of %d", ErrQueue, index, entries)
		}
		d, err := q.descriptor(table, index)
		if err != nil {
			return Chain{}, err
		}
		if !inIndirect {
			c.slots++
		}
		if d.flags&descIndirect != 0 {
			if inIndirect {
				return Chain{}, fmt.Errorf("%w: nested indirect table", ErrQueue)
			}
			if err := q.checkIndirect(d); err != nil {
				return Chain{}, err
			}
			// The write flag of this descriptor is ignored (§2.7.5.3.2).
			inIndirect, table, entries, index = true, d.addr, d.len/descSize, 0
			continue
		}
		if seen++; seen > q.size {
			return Chain{}, fmt.Errorf("%w: chain longer than the queue (%d): loop?", ErrQueue, q.size)
		}
		if total += uint64(d.len); total > math.MaxUint32 {
			return Chain{}, fmt.Errorf("%w: chain longer than 4 GiB", ErrQueue)
		}
		write := d.flags&descWrite != 0
		switch {
		case writing && !write:
			return Chain{}, fmt.Errorf("%w: readable descriptor after a writable one", ErrQueue) // §2.7.4.2
		case d.len == 0:
			// Names no byte; there is nothing to check or to use.
		case !q.mem.Contains(d.addr, uint64(d.len)):
			return Chain{}, fmt.Errorf("%w: buffer %#x+%#x outside memory", ErrQueue, d.addr, d.len)
		default:
			q.ranges = append(q.ranges, guestmem.Range{GPA: d.addr, Len: d.len})
			if !write {
				readable++
			}
		}
		writing = write
		if d.flags&descNext == 0 {
			break
		}
		index = uint32(d.next)
	}
	c.Readable, c.Writable = q.ranges[:readable:readable], q.ranges[readable:]
	return c, nil
}

// checkIndirect applies §2.7.5.3.1 to a descriptor that names a table.
func (q *Queue) checkIndirect(d descriptor) error {
	switch {
	case !q.indirect:
		return fmt.Errorf("%w: indirect table without VIRTIO_F_INDIRECT_DESC", ErrQueue)
	case d.flags&descNext != 0:
		return fmt.Errorf("%w: indirect table that also has a next descriptor", ErrQueue)
	case d.len == 0 || d.len%descSize != 0 || d.len/descSize > uint32(q.size):
		return fmt.Errorf("%w: indirect table of %d bytes in a queue of %d", ErrQueue, d.len, q.size)
	case !q.mem.Contains(d.addr, uint64(d.len)):
		return fmt.Errorf("%w: indirect table %#x+%#x outside memory", ErrQueue, d.addr, d.len)
	}
	return nil
}

// descriptor is struct virtq_desc, §2.7.5.
type descriptor struct {
	addr  uint64
	len   uint32
	flags uint16
	next  uint16
}

func (q *Queue) descriptor(table uint64, index uint32) (descriptor, error) {
	if err := q.mem.Read(table+descSize*uint64(index), q.raw[:]); err != nil {
		return descriptor{}, fmt.Errorf("%w: read descriptor: %w", ErrQueue, err)
	}
	return descriptor{
		addr:  binary.LittleEndian.Uint64(q.raw[0:]),
		len:   binary.LittleEndian.Uint32(q.raw[8:]),
		flags: binary.LittleEndian.Uint16(q.raw[12:]),
		next:  binary.LittleEndian.Uint16(q.raw[14:]),
	}, nil
}

// Push returns a buffer to the driver (§2.7.8): n bytes of its writable part
// were written, from the start on. The entry is published before Push returns.
func (q *Queue) Push(head uint16, n uint32) error {
	if err := q.fill(head, n); err != nil {
		return err
	}
	return q.publish()
}

// fill is Push without telling the driver. publish then tells it of all filled
// entries at once.
func (q *Queue) fill(head uint16, n uint32) error {
	if !q.ready {
		return nil
	}
	binary.LittleEndian.PutUint32(q.raw[0:], uint32(head))
	binary.LittleEndian.PutUint32(q.raw[4:], n)
	slot := uint64(q.nextUsed % q.size)
	if err := q.mem.Write(q.used+ringHeader+usedElem*slot, q.raw[:usedElem]); err != nil {
		return fmt.Errorf("%w: write used ring: %w", ErrQueue, err)
	}
	q.nextUsed++
	return nil
}

// publish shows the driver the filled entries.
func (q *Queue) publish() error {
	if !q.ready {
		return nil
	}
	if err := q.mem.StoreUint16(q.used+idxOffset, q.nextUsed); err != nil {
		return fmt.Errorf("%w: write used index: %w", ErrQueue, err)
	}
	return nil
}

// WantsInterrupt reports whether the driver wants to be told of used buffers
// (§2.7.7.2). Push stored the used index with a full barrier, so a driver that
// unmasks interrupts and then looks at the index misses no buffer (§2.7.14).
func (q *Queue) WantsInterrupt() bool {
	if !q.ready {
		return false
	}
	flags, err := q.mem.LoadUint16(q.avail)
	return err == nil && flags&availNoInterrupt == 0
}
