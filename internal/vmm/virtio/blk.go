package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"agentrun.dev/internal/vmm/guestmem"
)

// SectorSize is the unit of the protocol, for every sector size of the disk
// (§5.2.4).
const SectorSize = 512

// Feature bits, virtio 1.2 §5.2.3.
const (
	blkSegMax      = 1 << 2
	blkReadOnly    = 1 << 5
	blkBlockSize   = 1 << 6
	blkFlush       = 1 << 9
	blkDiscard     = 1 << 13
	blkWriteZeroes = 1 << 14
)

// Request types and status values, §5.2.6.
const (
	blkIn            = 0
	blkOut           = 1
	blkFlushRequest  = 4
	blkGetID         = 8
	blkDiscardReq    = 11
	blkWriteZeroesRq = 13

	blkOK          = 0
	blkIOError     = 1
	blkUnsupported = 2
)

const (
	blkQueueSize   = 256
	blkHeaderLen   = 16
	blkIDLen       = 20
	blkSegmentLen  = 16
	blkConfigLen   = 60
	blkMaxSegments = 32
	// A discard is cheap at any size. Zeros may have to be written, and a
	// capture waits for the request in flight.
	blkMaxDiscardSectors = 1 << 22 // 2 GiB
	blkMaxZeroSectors    = 1 << 17 // 64 MiB
)

// BlockConfig configures a Block device.
type BlockConfig struct {
	Disk Disk
	// ID is the serial number that the guest reads, cut to 20 bytes.
	ID   string
	Rate Rate
}

// BlockStats counts the work of a Block since it was made.
type BlockStats struct {
	Requests     uint64
	Errors       uint64 // requests that ended with a status other than OK
	ReadBytes    uint64
	WrittenBytes uint64
	Flushes      uint64
}

// Block is a disk, virtio 1.2 §5.2. Requests run in order, in a worker.
type Block struct {
	core
	worker worker

	// Constant after Restore.
	disk    Disk
	id      [blkIDLen]byte
	sectors uint64
	config  [blkConfigLen]byte

	header   [blkHeaderLen]byte // of the request in flight
	segments [blkMaxSegments * blkSegmentLen]byte
	throttle *throttle

	requests, errors, read, written, flushes atomic.Uint64
}

// NewBlock makes a device in front of a disk.
func NewBlock(cfg BlockConfig) *Block {
	b := &Block{
		disk: cfg.Disk, worker: newWorker(), throttle: newThrottle(cfg.Rate),
		sectors: uint64(cfg.Disk.Size()) / SectorSize,
	}
	copy(b.id[:], cfg.ID)
	b.describe()
	return b
}

// describe lays out struct virtio_blk_config, §5.2.4.
func (b *Block) describe() {
	put32 := func(off int, v uint32) { binary.LittleEndian.PutUint32(b.config[off:], v) }
	binary.LittleEndian.PutUint64(b.config[0:], b.sectors)
	put32(12, blkQueueSize-2) // seg_max: the header and the status take one each
	put32(20, SectorSize)     // blk_size
	if !b.disk.ReadOnly() {
		put32(36, blkMaxDiscardSectors)
		put32(40, blkMaxSegments)
		put32(44, 1) // discard_sector_alignment
		put32(48, blkMaxZeroSectors)
		put32(52, blkMaxSegments)
		b.config[56] = 1 // write_zeroes_may_unmap
	}
}

func (b *Block) Type() uint32         { return TypeBlock }
func (b *Block) QueueSizes() []uint16 { return []uint16{blkQueueSize} }

func (b *Block) Features() uint64 {
	f := uint64(blkSegMax | blkBlockSize | blkFlush)
	if b.disk.ReadOnly() {
		return f | blkReadOnly
	}
	return f | blkDiscard | blkWriteZeroes
}

func (b *Block) ReadConfig(off uint64, p []byte) { configRead(b.config[:], off, p) }
func (b *Block) WriteConfig(_ uint64, _ []byte)  {}

func (b *Block) Activate(ctx DriverContext) error {
	b.activate(ctx)
	b.worker.start(b.step)
	b.worker.wake()
	return nil
}

// Notify takes no lock: the worker may be in a long request.
func (b *Block) Notify(int) { b.worker.wake() }

func (b *Block) Reset() {
	b.deactivate()
	b.worker.stop()
}

func (b *Block) Resume() {
	b.unpause()
	b.worker.wake()
}

// Stats reads the counters one by one.
func (b *Block) Stats() BlockStats {
	return BlockStats{
		Requests: b.requests.Load(), Errors: b.errors.Load(),
		ReadBytes: b.read.Load(), WrittenBytes: b.written.Load(), Flushes: b.flushes.Load(),
	}
}

// step serves one request and reports whether to look for more.
func (b *Block) step() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.throttle.admit(b.worker.wake) {
		return false
	}
	c, ok := b.pop(0)
	if !ok {
		return false
	}
	before := b.read.Load() + b.written.Load()
	n, err := b.handle(c)
	b.throttle.spend(b.read.Load() + b.written.Load() - before)
	if err != nil {
		b.fail(fmt.Errorf("queue 0: %w", err))
		return false
	}
	b.push(0, c.Head, n)
	b.announce(0)
	return true
}

// handle answers one request. If the chain has no room for the status, the
// device cannot answer: that is an error of the driver, which stops the device.
func (b *Block) handle(c Chain) (uint32, error) {
	if len(c.Writable) == 0 {
		return 0, fmt.Errorf("%w: block request without a status byte", ErrQueue)
	}
	statusAddr, data := cutLast(c.Writable)
	dataLen := size(data)
	status, n := b.execute(c.Readable, data)
	b.requests.Add(1)
	if status != blkOK {
		b.errors.Add(1)
	}
	if err := b.ctx.Mem.Write(statusAddr, []byte{status}); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrQueue, err)
	}
	// The used length counts bytes written from the start of the buffer
	// (§2.7.8.2). So the status byte counts only if all bytes before it were
	// written.
	if n == dataLen {
		n++
	}
	return uint32(n), nil
}

// execute returns the status and how many bytes of in it has filled.
func (b *Block) execute(out, in []guestmem.Range) (status byte, n uint64) {
	if k, err := gather(b.ctx.Mem, out, b.header[:]); err != nil || k < blkHeaderLen {
		return blkIOError, 0
	}
	out = skip(out, blkHeaderLen)
	sector := binary.LittleEndian.Uint64(b.header[8:])
	switch binary.LittleEndian.Uint32(b.header[0:]) {
	case blkIn:
		return b.readSectors(sector, in)
	case blkOut:
		return b.writeSectors(sector, out), 0
	case blkFlushRequest:
		return b.flush(), 0
	case blkGetID:
		if size(in) < blkIDLen {
			return blkIOError, 0
		}
		k, err := scatter(b.ctx.Mem, in, b.id[:])
		if err != nil {
			return blkIOError, 0
		}
		return blkOK, uint64(k)
	case blkDiscardReq:
		return b.eraseSectors(out, blkDiscard), 0
	case blkWriteZeroesRq:
		return b.eraseSectors(out, blkWriteZeroes), 0
	}
	return blkUnsupported, 0
}

// inside reports whether n bytes from sector on are whole sectors inside the
// disk.
func (b *Block) inside(sector, n uint64) bool {
	return n%SectorSize == 0 && sector <= b.sectors && n/SectorSize <= b.sectors-sector
}

func (b *Block) readSectors(sector uint64, in []guestmem.Range) (byte, uint64) {
	want := size(in)
	if !b.inside(sector, want) {
		return blkIOError, 0
	}
	n, err := b.disk.ReadAt(b.ctx.Mem, in, int64(sector*SectorSize))
	b.read.Add(uint64(n))
	if err != nil || uint64(n) != want {
		return blkIOError, uint64(n)
	}
	return blkOK, want
}

func (b *Block) writeSectors(sector uint64, out []guestmem.Range) byte {
	want := size(out)
	if b.disk.ReadOnly() || !b.inside(sector, want) {
		return blkIOError
	}
	n, err := b.disk.WriteAt(b.ctx.Mem, out, int64(sector*SectorSize))
	b.written.Add(uint64(n))
	if err != nil || uint64(n) != want {
		return blkIOError
	}
	return b.writeThrough()
}

// writeThrough makes a write durable before it completes if the driver cannot
// flush (§5.2.6.2).
func (b *Block) writeThrough() byte {
	if b.ctx.Features&blkFlush != 0 {
		return blkOK
	}
	return b.flush()
}

func (b *Block) flush() byte {
	b.flushes.Add(1)
	if err := b.disk.Flush(); err != nil {
		return blkIOError
	}
	return blkOK
}

// eraseSectors carries out a discard or a write-zeroes request. It reads and
// checks all segments before it changes the first.
func (b *Block) eraseSectors(out []guestmem.Range, feature uint64) byte {
	n := size(out)
	switch {
	case b.disk.ReadOnly():
		return blkIOError
	case b.ctx.Features&feature == 0:
		return blkUnsupported
	case n == 0 || n%blkSegmentLen != 0 || n > uint64(len(b.segments)):
		return blkIOError
	}
	raw := b.segments[:n]
	if _, err := gather(b.ctx.Mem, out, raw); err != nil {
		return blkIOError
	}
	for s := raw; len(s) > 0; s = s[blkSegmentLen:] {
		if status := b.checkSegment(parseSegment(s), feature); status != blkOK {
			return status
		}
	}
	for s := raw; len(s) > 0; s = s[blkSegmentLen:] {
		if status := b.erase(parseSegment(s), feature); status != blkOK {
			return status
		}
	}
	return b.writeThrough()
}

// segment is struct virtio_blk_discard_write_zeroes, §5.2.6.
type segment struct {
	sector uint64
	count  uint32
	flags  uint32
}

const segmentUnmap = 1

func parseSegment(p []byte) segment {
	return segment{
		sector: binary.LittleEndian.Uint64(p[0:]),
		count:  binary.LittleEndian.Uint32(p[8:]),
		flags:  binary.LittleEndian.Uint32(p[12:]),
	}
}

// checkSegment checks a segment. Unknown flags, and unmap in a discard, are
// unsupported (§5.2.6.2).
func (b *Block) checkSegment(s segment, feature uint64) byte {
	known, most := uint32(segmentUnmap), uint32(blkMaxZeroSectors)
	if feature == blkDiscard {
		known, most = 0, blkMaxDiscardSectors
	}
	switch {
	case s.flags&^known != 0:
		return blkUnsupported
	case s.count > most || !b.inside(s.sector, uint64(s.count)*SectorSize):
		return blkIOError
	}
	return blkOK
}

func (b *Block) erase(s segment, feature uint64) byte {
	if s.count == 0 {
		return blkOK
	}
	off, n := int64(s.sector*SectorSize), int64(s.count)*SectorSize
	var err error
	if feature == blkDiscard {
		err = b.disk.Discard(off, n)
	} else {
		err = b.disk.WriteZeroes(off, n, s.flags&segmentUnmap != 0)
		b.written.Add(uint64(n))
	}
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return blkUnsupported
	case err != nil:
		return blkIOError
	}
	return blkOK
}
