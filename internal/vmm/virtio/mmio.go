package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"agentrun.dev/internal/vmm/guestmem"
)

// MMIOSize is the size of a device's register window.
const MMIOSize = 0x1000

// Registers, virtio 1.2 §4.2.2.
const (
	regMagic             = 0x000
	regVersion           = 0x004
	regDeviceID          = 0x008
	regVendorID          = 0x00c
	regDeviceFeatures    = 0x010
	regDeviceFeaturesSel = 0x014
	regDriverFeatures    = 0x020
	regDriverFeaturesSel = 0x024
	regQueueSel          = 0x030
	regQueueNumMax       = 0x034
	regQueueNum          = 0x038
	regQueueReady        = 0x044
	regQueueNotify       = 0x050
	regInterruptStatus   = 0x060
	regInterruptACK      = 0x064
	regStatus            = 0x070
	regQueueDescLow      = 0x080
	regQueueDescHigh     = 0x084
	regQueueDriverLow    = 0x090
	regQueueDriverHigh   = 0x094
	regQueueDeviceLow    = 0x0a0
	regQueueDeviceHigh   = 0x0a4
	regSHMSel            = 0x0ac
	regSHMLenLow         = 0x0b0
	regSHMLenHigh        = 0x0b4
	regSHMBaseLow        = 0x0b8
	regSHMBaseHigh       = 0x0bc
	regQueueReset        = 0x0c0
	regConfigGeneration  = 0x0fc
	regConfig            = 0x100
)

const (
	mmioMagic   = 0x74726976 // "virt"
	mmioVersion = 2
	mmioVendor  = 0x4e555241 // "ARUN"
)

// Device status bits, §2.1.
const (
	statusAcknowledge = 1
	statusDriver      = 2
	statusDriverOK    = 4
	statusFeaturesOK  = 8
	statusNeedsReset  = 64
	statusFailed      = 128

	statusAll = statusAcknowledge | statusDriver | statusDriverOK | statusFeaturesOK | statusFailed
)

// InterruptStatus bits, §4.2.2.
const (
	interruptUsed   = 1
	interruptConfig = 2
)

// MMIO is the virtio-mmio transport, version 2, in front of one device.
type MMIO struct {
	mem   *guestmem.Memory
	dev   Device
	raise func()

	// Devices change these with their own lock held, so they are atomics; see
	// the lock order in the package documentation.
	status     atomic.Uint32
	interrupts atomic.Uint32
	generation atomic.Uint32
	failure    atomic.Pointer[error] // why NEEDS_RESET was set last
	live       atomic.Bool           // DRIVER_OK: notifications pass
	paused     atomic.Bool           // no edges: Resume raises one for all of them

	// mu protects all following fields. They are the driver's own registers.
	mu                sync.Mutex
	deviceFeaturesSel uint32
	driverFeaturesSel uint32
	driverFeatures    uint64
	queueSel          uint32
	queues            []*Queue
}

// NewMMIO puts a device behind a register window. raise delivers one edge on
// the device's interrupt line; it is called from vCPU threads and workers, must
// not block and must not call the transport.
func NewMMIO(mem *guestmem.Memory, dev Device, raise func()) *MMIO {
	m := &MMIO{mem: mem, dev: dev, raise: raise}
	for _, n := range dev.QueueSizes() {
		m.queues = append(m.queues, newQueue(mem, n))
	}
	return m
}

// Failure is the reason why the device last set DEVICE_NEEDS_RESET, or nil.
func (m *MMIO) Failure() error {
	if p := m.failure.Load(); p != nil {
		return *p
	}
	return nil
}

// Read answers a guest's read of the window. Registers are 32 bits wide and
// aligned (§4.2.2.2); any other access reads zeros.
func (m *MMIO) Read(off uint64, data []byte) {
	clear(data)
	switch {
	case off >= regConfig:
		if configAccess(off, len(data)) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.dev.ReadConfig(off-regConfig, data)
		}
	case len(data) == 4 && off%4 == 0:
		binary.LittleEndian.PutUint32(data, m.readRegister(off))
	}
}

// Write carries out a guest's write to the window. It ignores writes that the
// specification forbids.
func (m *MMIO) Write(off uint64, data []byte) {
	switch {
	case off >= regConfig:
		if configAccess(off, len(data)) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.dev.WriteConfig(off-regConfig, data)
		}
	case len(data) == 4 && off%4 == 0:
		v := binary.LittleEndian.Uint32(data)
		if off == regQueueNotify {
			m.notify(v)
			return
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.writeRegister(off, v)
	}
}

// configAccess allows naturally aligned accesses of 1, 2, 4 or 8 bytes inside
// the window.
func configAccess(off uint64, n int) bool {
	switch n {
	case 1, 2, 4, 8:
		return off%uint64(n) == 0 && off < MMIOSize
	}
	return false
}

func (m *MMIO) readRegister(off uint64) uint32 {
	switch off {
	case regMagic:
		return mmioMagic
	case regVersion:
		return mmioVersion
	case regDeviceID:
		return m.dev.Type()
	case regVendorID:
		return mmioVendor
	case regInterruptStatus:
		return m.interrupts.Load()
	case regStatus:
		return m.status.Load()
	case regConfigGeneration:
		return m.generation.Load()
	case regSHMLenLow, regSHMLenHigh, regSHMBaseLow, regSHMBaseHigh:
		return math.MaxUint32 // no shared memory region has that id, §4.2.2
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch off {
	case regDeviceFeatures:
		return half(m.offered(), m.deviceFeaturesSel)
	case regQueueNumMax:
		if q := m.selected(); q != nil {
			return uint32(q.max)
		}
	case regQueueReady:
		if q := m.selected(); q != nil && q.ready {
			return 1
		}
	}
	return 0 // write-only, reserved, or QueueReset, which is not offered
}

func (m *MMIO) writeRegister(off uint64, v uint32) {
	switch off {
	case regDeviceFeaturesSel:
		m.deviceFeaturesSel = v
	case regDriverFeaturesSel:
		m.driverFeaturesSel = v
	case regDriverFeatures:
		m.acceptFeatures(v)
	case regQueueSel:
		m.queueSel = v
	case regInterruptACK:
		m.interrupts.And(^v)
	case regStatus:
		m.writeStatus(v)
	case regQueueReady:
		m.writeQueueReady(v)
	case regQueueNum, regQueueDescLow, regQueueDescHigh, regQueueDriverLow,
		regQueueDriverHigh, regQueueDeviceLow, regQueueDeviceHigh:
		m.writeQueue(off, v)
	}
}

// notify runs without the transport's lock. A device that is being reset or
// paused at this moment ignores the notification.
func (m *MMIO) notify(q uint32) {
	if m.live.Load() && uint64(q) < uint64(len(m.queues)) {
		m.dev.Notify(int(q))
	}
}

func (m *MMIO) offered() uint64 { return m.dev.Features() | transportFeatures }

// half returns the 32 bits of a feature set that a selector register selects.
func half(features uint64, sel uint32) uint32 {
	if sel > 1 {
		return 0
	}
	return uint32(features >> (32 * sel))
}

// acceptFeatures stores one half of the driver's features, until FEATURES_OK
// (§3.1.1 step 5).
func (m *MMIO) acceptFeatures(v uint32) {
	if m.driverFeaturesSel > 1 || m.status.Load()&statusFeaturesOK != 0 {
		return
	}
	shift := 32 * m.driverFeaturesSel
	m.driverFeatures = m.driverFeatures&^(math.MaxUint32<<shift) | uint64(v)<<shift
}

// writeStatus is the state machine of §2.1 and §3.1.1. A driver can only add
// bits, in order; a reset clears them.
func (m *MMIO) writeStatus(v uint32) {
	if v == 0 {
		m.reset()
		return
	}
	old := m.status.Load()
	v &= statusAll
	if old&^statusNeedsReset&^v != 0 {
		return // would clear a bit, §2.1.1
	}
	now := old
	for _, step := range []struct{ bit, needs uint32 }{
		{statusAcknowledge, 0},
		{statusDriver, statusAcknowledge},
		{statusFeaturesOK, statusDriver},
		{statusDriverOK, statusFeaturesOK},
		{statusFailed, 0},
	} {
		if v&step.bit == 0 || now&step.bit != 0 || now&step.needs != step.needs {
			continue
		}
		if step.bit == statusFeaturesOK && !m.featuresAcceptable() {
			continue
		}
		now |= step.bit
	}
	m.status.Or(now)
	if now&^old&statusDriverOK != 0 && now&statusNeedsReset == 0 {
		m.activate()
	}
}

// featuresAcceptable reports whether the features are a subset of those offered
// (§2.2.1) and include VERSION_1, without which §6.2 lets a device give up.
func (m *MMIO) featuresAcceptable() bool {
	return m.driverFeatures&^m.offered() == 0 && m.driverFeatures&FeatureVersion1 != 0
}

// activate hands the queues to the device.
func (m *MMIO) activate() {
	for _, q := range m.queues {
		q.indirect = m.driverFeatures&FeatureIndirectDesc != 0
	}
	m.live.Store(true)
	if err := m.dev.Activate(DriverContext{
		Mem:           m.mem,
		Queues:        m.queues,
		Features:      m.driverFeatures,
		Interrupt:     func() { m.interrupt(interruptUsed) },
		ConfigChanged: m.configChanged,
		Fail:          m.fail,
	}); err != nil {
		m.fail(fmt.Errorf("activate: %w", err))
	}
}

// interrupt sets the cause before it raises the line. Setting a cause that is
// already set raises again: the driver may have read the register and not yet
// acknowledged it, and looks at its rings after the acknowledgement.
func (m *MMIO) interrupt(cause uint32) {
	m.interrupts.Or(cause)
	if !m.paused.Load() {
		m.raise()
	}
}

func (m *MMIO) configChanged() {
	m.generation.Add(1)
	if m.status.Load()&statusDriverOK != 0 {
		m.interrupt(interruptConfig)
	}
}

// fail marks the device as in need of a reset (§2.1.2), and notifies a driver
// that is past DRIVER_OK.
func (m *MMIO) fail(err error) {
	m.failure.Store(&err)
	if m.status.Or(statusNeedsReset)&statusDriverOK != 0 {
		m.interrupt(interruptConfig)
	}
}

// reset returns when the device is quiet (§2.4.1). The device goes first: it
// may still raise or fail until its Reset returns.
func (m *MMIO) reset() {
	m.live.Store(false)
	m.dev.Reset()
	for _, q := range m.queues {
		q.reset()
	}
	m.deviceFeaturesSel, m.driverFeaturesSel, m.queueSel, m.driverFeatures = 0, 0, 0, 0
	m.failure.Store(nil)
	m.interrupts.Store(0)
	m.status.Store(0)
}

func (m *MMIO) selected() *Queue {
	if uint64(m.queueSel) >= uint64(len(m.queues)) {
		return nil
	}
	return m.queues[m.queueSel]
}

// configurable reports whether queues can be set up: between FEATURES_OK and
// DRIVER_OK (§3.1.1 step 7).
func (m *MMIO) configurable() bool {
	return m.status.Load()&(statusFeaturesOK|statusDriverOK|statusNeedsReset) == statusFeaturesOK
}

// writeQueue sets up the selected queue while it is not ready (§4.2.2.2).
func (m *MMIO) writeQueue(off uint64, v uint32) {
	q := m.selected()
	if q == nil || q.ready || !m.configurable() {
		return
	}
	low := func(p *uint64) { *p = *p&^math.MaxUint32 | uint64(v) }
	high := func(p *uint64) { *p = *p&math.MaxUint32 | uint64(v)<<32 }
	switch off {
	case regQueueNum:
		q.size = uint16(min(v, math.MaxUint16)) // a value that is too large fails the check: 65535 is not a power of two
	case regQueueDescLow:
		low(&q.desc)
	case regQueueDescHigh:
		high(&q.desc)
	case regQueueDriverLow:
		low(&q.avail)
	case regQueueDriverHigh:
		high(&q.avail)
	case regQueueDeviceLow:
		low(&q.used)
	case regQueueDeviceHigh:
		high(&q.used)
	}
}

// writeQueueReady checks the registers of a queue and enables it, or stops it.
// A queue that is stopped while the driver runs stays stopped until a reset:
// VIRTIO_F_RING_RESET is not offered.
func (m *MMIO) writeQueueReady(v uint32) {
	q := m.selected()
	switch {
	case q == nil:
	case v == 0 && q.ready:
		m.dev.Pause()
		q.ready = false
		if !m.paused.Load() {
			m.dev.Resume()
		}
	case v == 1 && !q.ready && m.configurable():
		if err := q.check(); err != nil {
			m.fail(fmt.Errorf("enable queue %d: %w", m.queueSel, err))
			return
		}
		q.nextAvail, q.nextUsed, q.ready = 0, 0, true
	}
}

// Pause returns when the device is quiet: requests in flight are finished,
// later ones are still in the ring, and the interrupt line has no edge until
// Resume.
func (m *MMIO) Pause() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dev.Pause()
	m.paused.Store(true)
}

// Resume lets the device run and scan its queues. It raises the interrupt again
// if the driver has not acknowledged it. Acknowledged ones need no repetition:
// KVM accepts an interrupt before raise returns, and keeps it in the state of
// the processor.
func (m *MMIO) Resume() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused.Store(false)
	m.dev.Resume()
	if cause := m.interrupts.Load(); cause != 0 && m.status.Load()&statusDriverOK != 0 {
		m.interrupt(cause)
	}
}

// Close ends the device's goroutines. The transport must not be used
// afterwards.
func (m *MMIO) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reset()
}

// errNotPaused is a mistake of the caller.
var errNotPaused = errors.New("device is not paused")
