package virtio

import (
	"encoding/binary"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// patience bounds every wait of a test; a healthy device is far faster.
const patience = time.Minute

// guest plays a driver: it lays out rings in guest memory and accesses
// registers. It does not use the device's own parsing.
type guest struct {
	t      testing.TB
	mem    *guestmem.Memory
	bus    *MMIO
	irq    chan struct{} // holds at most one
	raised atomic.Int64
	rings  []*ring
	next   uint64 // end of the memory that alloc has returned
}

type ring struct {
	size              uint16
	desc, avail, used uint64
	availIdx          uint16 // published
	usedIdx           uint16 // seen
	nextDesc          uint16
}

// buf is one descriptor.
type buf struct {
	gpa   uint64
	len   uint32
	write bool
}

func newMemory(t testing.TB, n uint64) *guestmem.Memory {
	t.Helper()
	mem, err := guestmem.NewAnonymous(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mem.Close(); err != nil {
			t.Error(err)
		}
	})
	return mem
}

// newGuest makes a guest whose device is not yet started.
func newGuest(t testing.TB, dev Device) *guest {
	t.Helper()
	g := &guest{t: t, mem: newMemory(t, 4<<20), next: guestmem.PageSize}
	g.attach(dev)
	return g
}

// attach connects a device, perhaps another one, to the guest.
func (g *guest) attach(dev Device) {
	g.irq = make(chan struct{}, 1)
	irq := g.irq
	bus := NewMMIO(g.mem, dev, func() {
		g.raised.Add(1)
		select {
		case irq <- struct{}{}:
		default:
		}
	})
	g.bus = bus
	g.t.Cleanup(bus.Close)
}

// startGuest makes a guest and brings its device up, each queue with 16 slots.
func startGuest(t testing.TB, dev Device) *guest {
	t.Helper()
	g := newGuest(t, dev)
	g.start(dev.Features()|transportFeatures, 16)
	return g
}

func (g *guest) readReg(off uint64) uint32 {
	var p [4]byte
	g.bus.Read(off, p[:])
	return binary.LittleEndian.Uint32(p[:])
}

func (g *guest) writeReg(off uint64, v uint32) {
	g.bus.Write(off, binary.LittleEndian.AppendUint32(nil, v))
}

// negotiate runs the initialization up to FEATURES_OK.
func (g *guest) negotiate(features uint64) {
	g.t.Helper()
	g.writeReg(regStatus, 0)
	g.writeReg(regStatus, statusAcknowledge)
	g.writeReg(regStatus, statusAcknowledge|statusDriver)
	g.writeReg(regDriverFeaturesSel, 0)
	g.writeReg(regDriverFeatures, uint32(features))
	g.writeReg(regDriverFeaturesSel, 1)
	g.writeReg(regDriverFeatures, uint32(features>>32))
	g.writeReg(regStatus, statusAcknowledge|statusDriver|statusFeaturesOK)
	if g.readReg(regStatus)&statusFeaturesOK == 0 {
		g.t.Fatalf("features %#x were refused", features)
	}
}

// setQueue writes the registers of a queue and enables it.
func (g *guest) setQueue(i int, r *ring) {
	g.writeReg(regQueueSel, uint32(i))
	g.writeReg(regQueueNum, uint32(r.size))
	g.writeReg(regQueueDescLow, uint32(r.desc))
	g.writeReg(regQueueDescHigh, uint32(r.desc>>32))
	g.writeReg(regQueueDriverLow, uint32(r.avail))
	g.writeReg(regQueueDriverHigh, uint32(r.avail>>32))
	g.writeReg(regQueueDeviceLow, uint32(r.used))
	g.writeReg(regQueueDeviceHigh, uint32(r.used>>32))
	g.writeReg(regQueueReady, 1)
}

func (g *guest) driverOK() {
	g.writeReg(regStatus, statusAcknowledge|statusDriver|statusFeaturesOK|statusDriverOK)
}

// start brings the device up with queues of n slots.
func (g *guest) start(features uint64, n uint16) {
	g.t.Helper()
	g.negotiate(features)
	g.rings = nil
	for i := range g.bus.queues {
		r := g.newRing(n)
		g.rings = append(g.rings, r)
		g.setQueue(i, r)
		if g.readReg(regQueueReady) != 1 {
			g.t.Fatalf("queue %d was refused: %v", i, g.bus.Failure())
		}
	}
	g.driverOK()
}

func (g *guest) newRing(n uint16) *ring {
	return &ring{
		size:  n,
		desc:  g.alloc(16 * uint64(n)),
		avail: g.alloc(6 + 2*uint64(n)),
		used:  g.alloc(6 + 8*uint64(n)),
	}
}

// alloc returns 16-aligned memory.
func (g *guest) alloc(n uint64) uint64 {
	g.t.Helper()
	gpa := g.next
	g.next = (g.next + n + 15) &^ 15
	if g.next > g.mem.Size() {
		g.t.Fatal("guest out of memory")
	}
	return gpa
}

func (g *guest) put(gpa uint64, p []byte) {
	g.t.Helper()
	if err := g.mem.Write(gpa, p); err != nil {
		g.t.Fatal(err)
	}
}

func (g *guest) get(gpa uint64, n int) []byte {
	g.t.Helper()
	p := make([]byte, n)
	if err := g.mem.Read(gpa, p); err != nil {
		g.t.Fatal(err)
	}
	return p
}

// out and in make descriptors.
func (g *guest) out(p []byte) buf {
	gpa := g.alloc(uint64(len(p)))
	g.put(gpa, p)
	return buf{gpa: gpa, len: uint32(len(p))}
}

func (g *guest) in(n int) buf {
	return buf{gpa: g.alloc(uint64(n)), len: uint32(n), write: true}
}

func rawDesc(addr uint64, n uint32, flags, next uint16) []byte {
	p := binary.LittleEndian.AppendUint64(nil, addr)
	p = binary.LittleEndian.AppendUint32(p, n)
	p = binary.LittleEndian.AppendUint16(p, flags)
	return binary.LittleEndian.AppendUint16(p, next)
}

func (g *guest) setDesc(r *ring, i uint16, addr uint64, n uint32, flags, next uint16) {
	g.put(r.desc+16*uint64(i%r.size), rawDesc(addr, n, flags, next))
}

// chain writes linked descriptors and returns the first.
func (g *guest) chain(r *ring, bufs ...buf) uint16 {
	head := r.nextDesc % r.size
	for i, b := range bufs {
		at := r.nextDesc % r.size
		r.nextDesc++
		var flags uint16
		if b.write {
			flags |= descWrite
		}
		if i < len(bufs)-1 {
			flags |= descNext
		}
		g.setDesc(r, at, b.gpa, b.len, flags, r.nextDesc%r.size)
	}
	return head
}

// publish puts a head into the avail ring.
func (g *guest) publish(r *ring, head uint16) {
	g.t.Helper()
	g.put(r.avail+4+2*uint64(r.availIdx%r.size), binary.LittleEndian.AppendUint16(nil, head))
	r.availIdx++
	if err := g.mem.StoreUint16(r.avail+2, r.availIdx); err != nil {
		g.t.Fatal(err)
	}
}

// add makes buffers available without notifying the device.
func (g *guest) add(q int, bufs ...buf) uint16 {
	g.t.Helper()
	head := g.chain(g.rings[q], bufs...)
	g.publish(g.rings[q], head)
	return head
}

// addIndirect does the same through an indirect table.
func (g *guest) addIndirect(q int, bufs ...buf) uint16 {
	g.t.Helper()
	var table []byte
	for i, b := range bufs {
		var flags uint16
		if b.write {
			flags |= descWrite
		}
		if i < len(bufs)-1 {
			flags |= descNext
		}
		table = append(table, rawDesc(b.gpa, b.len, flags, uint16(i+1))...)
	}
	r := g.rings[q]
	t := g.out(table)
	head := r.nextDesc % r.size
	r.nextDesc++
	g.setDesc(r, head, t.gpa, t.len, descIndirect, 0)
	g.publish(r, head)
	return head
}

func (g *guest) kick(q int) { g.writeReg(regQueueNotify, uint32(q)) }

func (g *guest) send(q int, bufs ...buf) uint16 {
	g.t.Helper()
	head := g.add(q, bufs...)
	g.kick(q)
	return head
}

// used takes an entry of the used ring.
func (g *guest) used(q int) (head, n uint32, ok bool) {
	g.t.Helper()
	r := g.rings[q]
	idx, err := g.mem.LoadUint16(r.used + 2)
	if err != nil {
		g.t.Fatal(err)
	}
	if idx == r.usedIdx {
		return 0, 0, false
	}
	p := g.get(r.used+4+8*uint64(r.usedIdx%r.size), 8)
	r.usedIdx++
	return binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint32(p[4:]), true
}

// wait takes an entry of the used ring, and waits for interrupts if necessary.
func (g *guest) wait(q int) (head, n uint32) {
	g.t.Helper()
	for {
		if head, n, ok := g.used(q); ok {
			return head, n
		}
		g.waitIRQ()
	}
}

func (g *guest) waitIRQ() {
	g.t.Helper()
	select {
	case <-g.irq:
	case <-time.After(patience):
		g.t.Fatalf("no interrupt (status %#x, failure %v)", g.readReg(regStatus), g.bus.Failure())
	}
}

// wantUsed takes an entry of the used ring that must be there already.
func (g *guest) wantUsed(q int) (head, n uint32) {
	g.t.Helper()
	head, n, ok := g.used(q)
	if !ok {
		g.t.Fatalf("queue %d: nothing used (status %#x, failure %v)", q, g.readReg(regStatus), g.bus.Failure())
	}
	return head, n
}

func (g *guest) wantBroken() {
	g.t.Helper()
	if s := g.readReg(regStatus); s&statusNeedsReset == 0 {
		g.t.Fatalf("status %#x: device does not ask for a reset", s)
	}
	if g.readReg(regInterruptStatus)&interruptConfig == 0 {
		g.t.Fatal("no configuration interrupt")
	}
	if g.bus.Failure() == nil {
		g.t.Fatal("no reason")
	}
}

func (g *guest) wantHealthy() {
	g.t.Helper()
	if s := g.readReg(regStatus); s&statusNeedsReset != 0 {
		g.t.Fatalf("device broke: %v", g.bus.Failure())
	}
}

// maskIRQ sets or clears VIRTQ_AVAIL_F_NO_INTERRUPT.
func (g *guest) maskIRQ(q int, masked bool) {
	var v uint16
	if masked {
		v = availNoInterrupt
	}
	if err := g.mem.StoreUint16(g.rings[q].avail, v); err != nil {
		g.t.Fatal(err)
	}
}

// save pauses the transport and returns its state.
func (g *guest) save() MMIOState {
	g.t.Helper()
	g.bus.Pause()
	s, err := g.bus.Save()
	if err != nil {
		g.t.Fatal(err)
	}
	return s
}

// restore continues on another device, in the same memory.
func (g *guest) restore(dev Device, s MMIOState) {
	g.t.Helper()
	g.attach(dev)
	if err := g.bus.Restore(s); err != nil {
		g.t.Fatal(err)
	}
}

// socketpair returns both ends, non-blocking and watched by the poller.
func socketpair(t testing.TB, kind int) (a, b *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	a, b = os.NewFile(uintptr(fds[0]), "a"), os.NewFile(uintptr(fds[1]), "b")
	deadline := time.Now().Add(patience)
	if err := b.SetDeadline(deadline); err != nil { // the test's end
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() }) // either may be closed already
	return a, b
}
