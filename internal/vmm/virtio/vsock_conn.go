package virtio

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"agentrun.dev/internal/vmm/guestmem"
	"golang.org/x/sys/unix"
)

// connKey names a connection by its two ports.
type connKey struct{ host, guest uint32 }

// vsockConn is one connection. The device's lock protects its fields, except
// those marked constant.
type vsockConn struct {
	dev  *Vsock          // constant
	key  connKey         // constant
	file *os.File        // constant; only the receive goroutine closes it
	raw  syscall.RawConn // constant
	wake chan struct{}   // constant; holds at most one wake-up

	result  func(error) // reports the outcome of Connect, once
	open    bool        // both sides agreed
	closed  bool        // not in dev.conns any more
	blocked bool        // the receive goroutine waits for the guest
	unsaid  uint8       // control packets that wait for receive buffers

	// Guest to host, §5.10.6.3: takenCnt-fwdCnt bytes wait in out.
	takenCnt uint32
	fwdCnt   uint32
	toldCnt  uint32 // fwdCnt as the guest knows it
	out      []byte
	flushing bool // a goroutine writes out
	deaf     bool // the host reads no more; data from the guest is dropped
	answered bool // the guest has sent data

	// Host to guest.
	sentCnt   uint32
	peerAlloc uint32
	peerCnt   uint32
	asked     bool // the host has asked for credit since it ran out
	eof       bool // the host sends no more

	peerShut uint32 // the directions that the guest has shut down
	hostShut uint8  // the directions that the host has shut down; the guest was or will be told

	writeFn  func(fd uintptr) // made once, so that a write costs no allocation
	writing  []byte
	written  int
	writeErr error
}

// newConn adds a connection and starts its receive goroutine, which owns the
// file from here on.
func (d *Vsock) newConn(key connKey, file *os.File) (*vsockConn, error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("vsock connection: %w", err)
	}
	if err := file.SetDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("vsock connection: socket must be non-blocking: %w", err)
	}
	c := &vsockConn{dev: d, key: key, file: file, raw: raw, wake: make(chan struct{}, 1)}
	c.writeFn = func(fd uintptr) { c.written, c.writeErr = unix.Write(int(fd), c.writing) }
	d.conns[key] = c
	d.wg.Go(c.receive)
	return c, nil
}

// drop ends a connection without telling the guest.
func (c *vsockConn) drop(err error) {
	if c.closed {
		return
	}
	c.closed = true
	delete(c.dev.conns, c.key)
	for i, t := range c.dev.talking {
		if t == c {
			c.dev.talking = append(c.dev.talking[:i], c.dev.talking[i+1:]...)
			break
		}
	}
	c.unsaid, c.out = 0, nil
	c.unblock()
	c.poke()
	c.report(err)
	// This wakes goroutines that wait in the poller. One of them closes the
	// file: Close would wait for the others, which may wait for our lock. The
	// call can fail only for a closed file, on which no goroutine waits.
	_ = c.file.SetDeadline(time.Unix(1, 0))
}

// abort ends a connection with a RST.
func (c *vsockConn) abort(err error) {
	if c.closed {
		return
	}
	c.drop(err)
	c.dev.queueReset(resetOf(c.key))
}

// report passes the result of Connect on, once the lock is released.
func (c *vsockConn) report(err error) {
	if f := c.result; f != nil {
		c.result = nil
		c.dev.callbacks = append(c.dev.callbacks, func() { f(err) })
	}
}

// poke wakes the receive goroutine.
func (c *vsockConn) poke() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// block notes that the receive goroutine will wait for the guest.
func (c *vsockConn) block() verdict {
	if !c.blocked {
		c.blocked = true
		c.dev.blocked++
	}
	return waitWake
}

func (c *vsockConn) unblock() {
	if c.blocked {
		c.blocked = false
		c.dev.blocked--
		c.poke()
	}
}

// take handles a packet from the guest. An error means that guest memory could
// not be read.
func (c *vsockConn) take(h vsockHeader, packet []guestmem.Range) error {
	c.updateCredit(h)
	if h.op == opReset {
		c.drop(ErrVsockReset)
		return nil
	}
	if !c.open {
		if h.op == opResponse && c.unsaid&sayRequest == 0 {
			c.open = true
			c.report(nil)
			c.unblock()
			return nil
		}
		c.abort(ErrVsockReset)
		return nil
	}
	switch h.op {
	case opData:
		return c.takeData(packet, h.len)
	case opShutdown:
		c.peerShut |= h.flags & shutBoth // hints are permanent, §5.10.6.5
		c.settle()
	case opCreditUpdate:
	case opCreditRequest:
		c.say(sayCreditUpdate)
	default: // a second request or response, or an unknown operation
		c.abort(ErrVsockReset)
	}
	return nil
}

// takeData forwards n bytes to the host. If the guest exceeds its credit, the
// connection ends.
func (c *vsockConn) takeData(packet []guestmem.Range, n uint32) error {
	if c.peerShut&shutSend != 0 || n > VsockBuffer-(c.takenCnt-c.fwdCnt) {
		c.abort(ErrVsockReset)
		return nil
	}
	c.takenCnt += n
	c.answered = true
	c.dev.stats.TxBytes += uint64(n)
	for left := uint64(n); left > 0 && !c.closed; {
		p, rest, err := c.dev.payload(packet, left)
		if err != nil {
			return err
		}
		packet, left = rest, left-uint64(len(p))
		c.forward(p)
	}
	return nil
}

// forward writes straight to the host's socket, in order. It buffers data that
// does not fit.
func (c *vsockConn) forward(p []byte) {
	if len(c.out) == 0 && !c.deaf {
		p = p[c.write(p):]
	}
	if c.deaf {
		c.forwardedAll()
		return
	}
	if len(p) == 0 {
		return
	}
	c.out = append(c.out, p...)
	if !c.flushing {
		c.flushing = true
		c.dev.wg.Go(c.flushOut)
	}
}

// write writes as much as possible to the host's socket. If the host reads no
// more, the connection becomes deaf, but data that the host has sent still goes
// to the guest.
func (c *vsockConn) write(p []byte) int {
	n := 0
	for n < len(p) {
		c.writing = p[n:]
		if err := c.raw.Control(c.writeFn); err != nil {
			c.writeErr = err
		}
		c.writing = nil
		switch {
		case errors.Is(c.writeErr, unix.EINTR):
			continue
		case errors.Is(c.writeErr, unix.EAGAIN):
			c.forwarded(n)
			return n
		case c.writeErr != nil:
			c.forwarded(n)
			c.goDeaf()
			return n
		}
		n += c.written
	}
	c.forwarded(n)
	return n
}

func (c *vsockConn) goDeaf() {
	c.deaf, c.out = true, nil
	c.forwardedAll()
	c.shut(shutReceive)
}

// forwardedAll counts all data from the guest as forwarded.
func (c *vsockConn) forwardedAll() { c.forwarded(int(c.takenCnt - c.fwdCnt)) }

// shut tells the guest that the host has finished a direction.
func (c *vsockConn) shut(flags uint8) {
	if c.hostShut|flags != c.hostShut {
		c.hostShut |= flags
		c.say(sayShutdown)
	}
}

// forwarded counts bytes that left the buffer. The guest is told after a
// quarter of its credit. So a guest that believes its credit is used up always
// gets an update, because then the whole buffer is unannounced.
func (c *vsockConn) forwarded(n int) {
	c.fwdCnt += uint32(n)
	if c.fwdCnt-c.toldCnt >= VsockBuffer/4 {
		c.say(sayCreditUpdate)
	}
}

// settle carries out the guest's shutdown once all of its earlier data was
// forwarded (§5.10.6.5). When the guest has finished both directions, the
// connection ends, and a RST confirms that.
func (c *vsockConn) settle() {
	if c.closed || len(c.out) > 0 {
		return
	}
	if c.peerShut == shutBoth {
		c.abort(ErrVsockReset)
		return
	}
	how := -1
	switch c.peerShut {
	case shutSend:
		how = unix.SHUT_WR
	case shutReceive:
		how = unix.SHUT_RD
	default:
		return
	}
	// This fails only if the file is closed, and with it both directions.
	_ = c.raw.Control(func(fd uintptr) { shutdownSocket(fd, how) })
}

// flushOut runs in a goroutine of its own until the buffer is empty.
func (c *vsockConn) flushOut() {
	if err := c.raw.Write(c.writeOut); err != nil {
		c.dev.mu.Lock()
		defer c.dev.unlock()
		c.flushing = false
		c.abort(ErrVsockReset)
		c.dev.flush()
	}
}

// writeOut is called when the host's socket is writable. It returns false to
// wait for more room.
func (c *vsockConn) writeOut(uintptr) bool {
	c.dev.mu.Lock()
	defer c.dev.unlock()
	if !c.closed && !c.deaf {
		if n := c.write(c.out); !c.deaf {
			c.out = c.out[n:]
		}
	}
	if len(c.out) > 0 {
		c.dev.flush() // a credit update may be due
		return false
	}
	c.out, c.flushing = nil, false
	c.settle()
	c.dev.flush()
	return true
}

// receive moves bytes from the host to the guest until the connection ends, and
// closes the file.
func (c *vsockConn) receive() {
	defer c.file.Close()
	for {
		var next verdict
		if err := c.raw.Read(func(fd uintptr) bool {
			for {
				if next = c.deliver(int(fd)); next != again {
					return next != waitSocket
				}
			}
		}); err != nil {
			next = c.giveUp()
		}
		switch next {
		case finished:
			return
		case linger:
			c.await(c.dev.closeTimeout)
		default:
			<-c.wake
		}
	}
}

// giveUp ends the connection from the host's side.
func (c *vsockConn) giveUp() verdict {
	c.dev.mu.Lock()
	defer c.dev.unlock()
	c.abort(ErrVsockReset)
	c.dev.flush()
	return finished
}

// await waits until the guest confirms a close or the timeout ends.
func (c *vsockConn) await(timeout time.Duration) {
	t := time.NewTimer(timeout)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			c.giveUp()
			return
		case <-c.wake:
			c.dev.mu.Lock()
			closed := c.closed
			c.dev.mu.Unlock()
			if closed {
				return
			}
		}
	}
}

// deliver moves one packet. It checks credit and takes a receive buffer first,
// so that data without either stays in the host's socket.
func (c *vsockConn) deliver(fd int) verdict {
	d := c.dev
	d.mu.Lock()
	defer d.unlock()
	switch {
	case c.closed:
		return finished
	case c.eof || c.peerShut&shutReceive != 0:
		c.eof = true
		return c.watchHangup(fd)
	case d.paused && d.knocked != nil && c.open:
		return c.knock(fd)
	case !d.running() || !c.open || !d.flush() || c.unsaid&sayResponse != 0:
		return c.block()
	}
	credit := c.credit()
	if credit == 0 {
		if !c.asked {
			c.asked = true
			c.say(sayCreditRequest)
			d.flush()
		}
		return c.block()
	}
	c.asked = false
	buf, room := d.rxBuffer()
	if room == 0 {
		return c.block()
	}
	p := d.scratch()
	n, err := unix.Read(fd, p[vsockHeaderLen:vsockHeaderLen+min(room, int(credit))])
	if n > 0 {
		h := c.header()
		h.op, h.len = opData, uint32(n)
		h.put(p)
		c.sentCnt += uint32(n)
		d.stats.RxBytes += uint64(n)
		d.sendPacket(buf, p[:vsockHeaderLen+n])
		d.used()
		return again
	}
	d.ctx.Queues[vsockRx].Unpop()
	switch {
	case errors.Is(err, unix.EINTR):
		return again
	case errors.Is(err, unix.EAGAIN):
		return waitSocket
	case err != nil:
		c.abort(ErrVsockReset)
		d.flush()
		return finished
	}
	c.eof = true
	return c.watchHangup(fd)
}

// knock calls the function of WakeOn because the host has sent data to a paused
// guest. The end of the stream does not count: the guest learns of it when it
// continues.
func (c *vsockConn) knock(fd int) verdict {
	var b [1]byte
	n, _, _, _, err := unix.Recvmsg(fd, b[:], nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch {
	case n > 0:
		c.dev.callbacks = append(c.dev.callbacks, c.dev.knocked)
		c.dev.knocked = nil
	case errors.Is(err, unix.EINTR):
		return again
	case errors.Is(err, unix.EAGAIN):
		return waitSocket
	}
	return c.block()
}

// watchHangup follows the end of the host's stream: first the host stops
// sending, then, perhaps at once, it closes the socket.
func (c *vsockConn) watchHangup(fd int) verdict {
	c.shut(shutSend)
	if hungUp(fd) {
		c.shut(shutBoth)
	}
	c.dev.flush()
	if c.hostShut == shutBoth {
		return linger
	}
	return waitSocket
}
