package virtio

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"
	"time"

	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// A fuzz input is a program for a guest: its writes to memory, to its rings and
// to registers, and the actions of the host meanwhile.
const (
	doMemory = iota // address u32, length u8, bytes
	doChain         // queue u8, count u8, then address u32, length u32, flags u8 each
	doWrite         // register u16, width u8, value u64
	doRead          // register u16, width u8
	doNotify        // queue u8
	doHost          // length u8, bytes
	doPause
	doRestart
	doKinds
)

const (
	fuzzMemory   = 256 << 10
	fuzzRing     = 8
	maxRestarts  = 4
	maxFuzzSteps = 64
)

// program builds seeds.
type program []byte

func (p program) memory(addr uint32, b []byte) program {
	for len(b) > 0 {
		n := min(len(b), 255)
		p = append(p, doMemory)
		p = binary.LittleEndian.AppendUint32(p, addr)
		p = append(append(p, byte(n)), b[:n]...)
		addr, b = addr+uint32(n), b[n:]
	}
	return p
}

func (p program) chain(q byte, bufs ...buf) program {
	p = append(p, doChain, q, byte(len(bufs)))
	for _, b := range bufs {
		p = binary.LittleEndian.AppendUint32(p, uint32(b.gpa))
		p = binary.LittleEndian.AppendUint32(p, b.len)
		if b.write {
			p = append(p, descWrite)
		} else {
			p = append(p, 0)
		}
	}
	return p
}

func (p program) write(reg uint16, width byte, v uint64) program {
	p = append(binary.LittleEndian.AppendUint16(append(p, doWrite), reg), width)
	return binary.LittleEndian.AppendUint64(p, v)
}

func (p program) read(reg uint16, width byte) program {
	return append(binary.LittleEndian.AppendUint16(append(p, doRead), reg), width)
}

func (p program) host(b []byte) program { return append(append(p, doHost, byte(len(b))), b...) }
func (p program) pause() program        { return append(p, doPause) }
func (p program) restart() program      { return append(p, doRestart) }
func (p program) notify(q byte) program { return append(p, doNotify, q) }

// fuzzer runs a program. settle, if set, waits until the device has finished its
// work; host is the other side.
type fuzzer struct {
	*guest
	data     []byte
	settle   func()
	host     func([]byte)
	restarts int
}

func newFuzzer(t *testing.T, dev Device, data []byte) *fuzzer {
	f := &fuzzer{data: data, settle: func() {}, host: func([]byte) {}}
	f.guest = &guest{t: t, mem: newMemory(t, fuzzMemory), next: guestmem.PageSize}
	f.attach(dev)
	return f
}

// take returns the next n bytes of the program, zeros beyond its end.
func (f *fuzzer) take(n int) []byte {
	p := make([]byte, n)
	f.data = f.data[copy(p, f.data):]
	return p
}

func (f *fuzzer) u8() byte    { return f.take(1)[0] }
func (f *fuzzer) u16() uint16 { return binary.LittleEndian.Uint16(f.take(2)) }
func (f *fuzzer) u32() uint32 { return binary.LittleEndian.Uint32(f.take(4)) }
func (f *fuzzer) u64() uint64 { return binary.LittleEndian.Uint64(f.take(8)) }

// run executes the program, then checks that a reset makes the device work
// again.
func (f *fuzzer) run() {
	f.up()
	for step := 0; len(f.data) > 0 && step < maxFuzzSteps; step++ {
		f.step()
		f.settle()
		if s := f.bus.status.Load(); s&statusNeedsReset != 0 && f.bus.Failure() == nil {
			f.t.Fatalf("status %#x without a reason", s)
		}
	}
	f.restarts = 0
	f.up()
	f.wantHealthy()
}

func (f *fuzzer) up() {
	if f.restarts++; f.restarts <= maxRestarts {
		f.next = guestmem.PageSize
		if err := f.mem.Zero(0, 0x8000); err != nil {
			f.t.Fatal(err)
		}
		f.start(f.bus.dev.Features()|transportFeatures, fuzzRing)
	}
}

func (f *fuzzer) step() {
	switch f.u8() % doKinds {
	case doMemory:
		addr := uint64(f.u32())
		_ = f.mem.Write(addr, f.take(int(f.u8()))) // may be outside
	case doChain:
		q := int(f.u8()) % len(f.rings)
		bufs := make([]rawBuf, f.u8()%(fuzzRing+1))
		for i := range bufs {
			bufs[i] = rawBuf{uint64(f.u32()), f.u32(), uint16(f.u8())}
		}
		f.rawChain(f.rings[q], bufs)
		f.kick(q)
	case doWrite:
		reg, p := uint64(f.u16()), f.take(int(f.u8()%9))
		v := binary.LittleEndian.AppendUint64(nil, f.u64())
		f.bus.Write(reg, append(p[:0], v[:len(p)]...))
	case doRead:
		reg := uint64(f.u16())
		f.bus.Read(reg, make([]byte, f.u8()%9))
	case doNotify:
		f.kick(int(f.u8()))
	case doHost:
		f.host(f.take(int(f.u8())))
	case doPause:
		s := f.save()
		if bus := NewMMIO(f.mem, &inert{f.bus.dev}, func() {}); s.Status&statusDriverOK != 0 {
			if err := bus.Restore(s); err != nil {
				f.t.Fatalf("a saved state is refused: %v", err)
			}
		}
		f.bus.Resume()
	case doRestart:
		f.up()
	}
}

// inert has the methods of a device, for checking states.
type inert struct{ Device }

func (inert) Activate(DriverContext) error { return nil }
func (inert) Reset()                       {}
func (inert) Pause()                       {}
func (inert) Resume()                      {}

type rawBuf struct {
	gpa   uint64
	len   uint32
	flags uint16
}

// rawChain publishes descriptors with the fuzzer's flags.
func (f *fuzzer) rawChain(r *ring, bufs []rawBuf) {
	head := r.nextDesc % r.size
	for i, b := range bufs {
		at := r.nextDesc % r.size
		r.nextDesc++
		flags := b.flags
		if i < len(bufs)-1 {
			flags |= descNext
		}
		f.setDesc(r, at, b.gpa, b.len, flags, r.nextDesc%r.size)
	}
	f.publish(r, head)
}

func FuzzQueue(f *testing.F) {
	loop := make([]byte, 0x400)
	copy(loop, rawDesc(0x800, 16, descNext, 1))
	copy(loop[16:], rawDesc(0x900, 16, descWrite, 0))
	binary.LittleEndian.PutUint16(loop[0x202:], 1)
	f.Add(uint16(0), loop)
	indirect := bytes.Clone(loop)
	copy(indirect, rawDesc(0x300, 32, descIndirect, 0))
	copy(indirect[0x300:], rawDesc(0x800, 16, descNext, 1))
	copy(indirect[0x310:], rawDesc(0x900, 16, descWrite, 0))
	f.Add(uint16(0), indirect)
	f.Add(uint16(65535), bytes.Repeat([]byte{1}, 0x400))
	f.Add(uint16(7), []byte{})
	f.Fuzz(func(t *testing.T, start uint16, data []byte) {
		mem := newMemory(t, 4*guestmem.PageSize)
		_ = mem.Write(0, data[:min(len(data), 4*guestmem.PageSize)])
		q := newQueue(mem, 8)
		q.desc, q.avail, q.used, q.ready, q.indirect = 0, 0x200, 0x280, true, true
		q.nextAvail, q.nextUsed = start, start
		if err := q.check(); err != nil {
			t.Fatal(err)
		}
		for range 16 {
			c, ok, err := q.Pop()
			if err != nil || !ok {
				return
			}
			if c.Head >= 8 || len(c.Readable)+len(c.Writable) > 8 || c.slots == 0 || c.slots > 8 ||
				size(c.Readable)+size(c.Writable) > 1<<32-1 {
				t.Fatalf("chain %+v", c)
			}
			for _, r := range append(c.Readable, c.Writable...) {
				if !mem.Contains(r.GPA, uint64(r.Len)) {
					t.Fatalf("range %+v", r)
				}
			}
			if err := q.Push(c.Head, 0); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func FuzzMMIO(f *testing.F) {
	up := program{}.write(regStatus, 4, 0).write(regStatus, 4, 3).
		write(regDriverFeaturesSel, 4, 1).write(regDriverFeatures, 4, 1).write(regStatus, 4, 11).
		write(regQueueSel, 4, 1).write(regQueueNum, 4, 8).
		write(regQueueDescLow, 4, 0x8000).write(regQueueDescHigh, 4, 0).
		write(regQueueDriverLow, 4, 0x9000).write(regQueueDriverHigh, 4, 0).
		write(regQueueDeviceLow, 4, 0xa000).write(regQueueDeviceHigh, 4, 0).
		write(regQueueReady, 4, 1).write(regStatus, 4, 15).notify(1)
	f.Add([]byte(up.write(regQueueReady, 4, 0).write(regInterruptACK, 4, 3).pause().restart()))
	reads := program{}
	for reg := uint16(0); reg <= regConfig; reg += 4 {
		reads = reads.read(reg, 4)
	}
	f.Add([]byte(reads))
	f.Add([]byte(program{}.write(regConfig+4, 4, 9).read(regConfig+4, 8).read(regConfig, 3).write(regStatus, 2, 1).
		write(regQueueSel, 4, 99).write(regQueueReady, 4, 1).notify(255)))
	f.Fuzz(func(t *testing.T, data []byte) {
		newFuzzer(t, NewBalloon(), data).run()
	})
}

func FuzzBlock(f *testing.F) {
	const at, data = 0x9000, 0xa000
	status := buf{0xf000, 1, true}
	for _, h := range [][]byte{
		blkHeader(blkIn, 1), blkHeader(blkOut, 1), blkHeader(blkFlushRequest, 0), blkHeader(blkGetID, 0), blkHeader(99, 0),
	} {
		f.Add([]byte(program{}.memory(at, h).chain(0, buf{at, 16, false}, buf{data, 512, true}, status).
			chain(0, buf{at, 16, false}, buf{data, 512, false}, status).pause()))
	}
	for _, h := range [][]byte{
		append(blkHeader(blkDiscardReq, 0), blkSegment(0, 1, 0)...),
		append(blkHeader(blkWriteZeroesRq, 0), blkSegment(2, 1, 1)...),
		append(blkHeader(blkWriteZeroesRq, 0), blkSegment(2, 99, 9)...),
	} {
		f.Add([]byte(program{}.memory(at, h).chain(0, buf{at, 32, false}, status).restart()))
	}
	f.Add([]byte(program{}.chain(0, buf{at, 16, false})))
	f.Fuzz(func(t *testing.T, program []byte) {
		disk := newDisk(4)
		b := NewBlock(BlockConfig{Disk: disk, ID: "fuzz"})
		fz := newFuzzer(t, b, program)
		fz.settle = func() {
			for b.step() {
			}
		}
		fz.run()
		if len(disk.data) != 4*SectorSize {
			t.Fatal("disk changed its size")
		}
	})
}

func FuzzRNG(f *testing.F) {
	f.Add([]byte(program{}.chain(0, buf{0x9000, 100, true}).chain(0, buf{0x9000, 0x20000, true}, buf{0x9000, 1, true}).pause()))
	f.Add([]byte(program{}.chain(0, buf{0x9000, 100, false}).chain(0, buf{1 << 30, 100, true}).restart()))
	f.Fuzz(func(t *testing.T, program []byte) {
		r := NewRNG()
		newFuzzer(t, r, program).run()
		if r.Bytes() > maxFuzzSteps*fuzzRing*rngMaxRequest {
			t.Fatalf("gave %d bytes", r.Bytes())
		}
	})
}

func FuzzBalloon(f *testing.F) {
	list := program{}.memory(0x9000, pfnList(16, 17, 18, 30, 1<<20, 16, 63, 64))
	f.Add([]byte(list.chain(0, buf{0x9000, 32, false}).chain(1, buf{0x9000, 32, false}).pause()))
	f.Add([]byte(list.chain(2, buf{0x10000, 8192, true}, buf{0x10800, 4096, true}).write(regConfig+4, 4, 3).read(regConfig, 8)))
	f.Add([]byte(program{}.chain(0, buf{0x8000, 0x20000, false}).host([]byte{5}).restart()))
	f.Fuzz(func(t *testing.T, program []byte) {
		b := NewBalloon()
		fz := newFuzzer(t, b, program)
		fz.host = func(p []byte) { b.SetTarget(uint32(len(p))) }
		fz.run()
	})
}

func FuzzNet(f *testing.F) {
	good := program{}.memory(0x9000, netPacket(frame(60, 1)))
	h, long := tso(3000)
	f.Add([]byte(program{}.memory(0x9000, netPacketOf(h, long)).chain(1, buf{0x9000, 12, false}, buf{0x900c, uint32(len(long)), false})))
	f.Add([]byte(program{}.host(messageOf(h, long)).chain(0, buf{0xa000, 1600, true}).chain(0, buf{0xb000, 1600, true}).pause()))
	f.Add([]byte(good.chain(1, buf{0x9000, 12, false}, buf{0x900c, 60, false}).chain(1, buf{0x9000, 20, false}).pause()))
	f.Add([]byte(good.host(message(frame(60, 2))).chain(0, buf{0xa000, 12, true}, buf{0xb000, 1600, true}).host(message(frame(3, 1))).restart()))
	f.Add([]byte(program{}.memory(0x9000, []byte{1, 1}).chain(1, buf{0x9000, 100, false}).chain(0, buf{0xa000, 20, true}).host(message(frame(60, 2)))))
	f.Fuzz(func(t *testing.T, program []byte) {
		n, host := newNet(t, unix.SOCK_DGRAM)
		fz := newFuzzer(t, n, program)
		fz.host = func(p []byte) { _, _ = host.Write(p) } // may be full
		fz.settle = func() {
			_ = n.raw.Control(func(fd uintptr) {
				for n.transmit(int(fd)) == again {
				}
				for n.deliver(int(fd)) == again {
				}
			})
		}
		if err := host.SetWriteDeadline(time.Unix(1, 0)); err != nil { // never wait
			t.Fatal(err)
		}
		fz.run()
	})
}

// vsockProgram sends packets with given headers, after giving rx receive
// buffers.
func vsockProgram(rx int, packets ...[]byte) program {
	p := program{}
	for i := range rx {
		p = p.chain(vsockRx, buf{uint64(0x20000 + 0x400*i), 0x400, true})
	}
	p = p.chain(vsockEvent, buf{0x30000, 8, true})
	for _, packet := range packets {
		p = p.memory(0x9000, packet).chain(vsockTx, buf{0x9000, uint32(len(packet)), false})
	}
	return p
}

func vsockPacket(op uint16, flags uint32, payload string) []byte {
	h := vsockHeader{
		srcCID: GuestCID, dstCID: HostCID, srcPort: 9, dstPort: acceptPort, kind: vsockStream,
		op: op, flags: flags, len: uint32(len(payload)), bufAlloc: 1000,
	}
	p := make([]byte, vsockHeaderLen+len(payload))
	h.put(p)
	copy(p[vsockHeaderLen:], payload)
	return p
}

func FuzzVsock(f *testing.F) {
	request := vsockPacket(opRequest, 0, "")
	f.Add([]byte(vsockProgram(6, request, vsockPacket(opData, 0, "hello"), vsockPacket(opShutdown, 3, "")).pause()))
	f.Add([]byte(vsockProgram(4, request).host([]byte("\x00data")).host([]byte{1}).chain(vsockRx, buf{0x20000, 0x400, true})))
	f.Add([]byte(vsockProgram(4, request, vsockPacket(opCreditRequest, 0, ""), vsockPacket(opReset, 0, "")).host([]byte{2})))
	f.Add([]byte(vsockProgram(0, request, vsockPacket(9, 0, ""), request, vsockPacket(opShutdown, 1, "")).restart()))
	f.Add([]byte(vsockProgram(2).host([]byte{3}).notify(vsockEvent).host([]byte{2}).host([]byte{3})))
	f.Add([]byte(vsockProgram(1, request[:20], vsockPacket(opData, 0, "nobody"), append(request, 1))))
	f.Fuzz(func(t *testing.T, program []byte) { fuzzVsock(t, program) })
}

func fuzzVsock(t *testing.T, program []byte) {
	var hosts []*os.File
	pair := func() *os.File {
		a, b := socketpair(t, unix.SOCK_STREAM)
		if err := b.SetDeadline(time.Unix(1, 0)); err != nil { // never wait
			t.Fatal(err)
		}
		hosts = append(hosts, b)
		return a
	}
	d := NewVsock(VsockConfig{Accept: func(port uint32) (*os.File, bool) {
		if port != acceptPort || len(hosts) >= 8 {
			return nil, false
		}
		return pair(), true
	}})
	fz := newFuzzer(t, d, program)
	fz.host = func(p []byte) {
		if len(p) == 0 {
			return
		}
		for _, h := range hosts {
			switch p[0] % 4 {
			case 0:
				_, _ = h.Write(p[1:])
			case 1:
				_ = h.Close()
			}
		}
		switch p[0] % 4 {
		case 2:
			if len(hosts) < 8 {
				d.ConnectStandby(uint32(len(p)), pair(), func(error) {})
			}
			if st := d.Save(); st.Gone > MaxVsockConns {
				t.Fatalf("%d connections are gone", st.Gone)
			}
		case 3:
			if len(hosts) < 8 {
				d.Connect(uint32(len(p)), pair(), func(error) {})
			}
		}
	}
	fz.settle = func() {
		for _, c := range liveConns(d) {
			if err := c.raw.Control(func(fd uintptr) {
				for c.deliver(int(fd)) == again {
				}
			}); err != nil {
				continue // closed meanwhile
			}
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if len(d.resets) > vsockMaxResets || len(d.talking) > len(d.conns) || len(d.conns) > MaxVsockConns {
			t.Fatalf("%d resets, %d talk, %d connections", len(d.resets), len(d.talking), len(d.conns))
		}
		for _, c := range d.conns {
			if len(c.out) > VsockBuffer || c.takenCnt-c.fwdCnt > VsockBuffer {
				t.Fatalf("%d bytes buffered", len(c.out))
			}
		}
	}
	fz.run()
}

func liveConns(d *Vsock) []*vsockConn {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*vsockConn
	for _, c := range d.conns {
		all = append(all, c)
	}
	return all
}
