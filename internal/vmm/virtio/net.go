package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Feature bits, virtio 1.2 §5.1.3. No offloads and no mergeable buffers.
const (
	netMTU = 1 << 3
	netMAC = 1 << 5
)

// Queues, §5.1.2.
const (
	netRx = iota
	netTx
)

const (
	netQueueSize  = 256
	netHeaderLen  = 12 // struct virtio_net_hdr, §5.1.6
	netNumBuffers = 10 // offset of num_buffers in it
	netConfigLen  = 12
	ethernetLen   = 14
	vlanTagLen    = 4
	// netMinMTU is the least §5.1.4.1 allows a device to announce.
	netMinMTU = 68
)

// NetConfig says what a Net device shows to its guest and where frames go.
type NetConfig struct {
	MAC [6]byte
	MTU uint16
	// Socket is a non-blocking unix socket that keeps messages apart
	// (SOCK_DGRAM or SOCK_SEQPACKET): one Ethernet frame per message. The
	// caller closes it after the device was reset.
	Socket *os.File
}

// NetStats counts frames, as the guest sees directions.
type NetStats struct {
	RxFrames, RxBytes, RxDropped uint64
	TxFrames, TxBytes, TxDropped uint64
}

// Net is a network card, virtio 1.2 §5.1, with one pair of queues.
//
// Guest to host: a worker sends each frame; when the socket is full the frame
// is dropped and counted, as a wire would. Host to guest: a goroutine sleeps in
// the network poller; when the guest has no buffer, frames stay in the socket,
// whose bounded queue is the back pressure.
type Net struct {
	core
	tx worker

	config [netConfigLen]byte // constant
	mtu    int                // constant
	socket *os.File           // constant
	raw    syscall.RawConn    // constant

	// rxWake makes the receiver look again when it waits for the guest.
	rxWake chan struct{}
	rxQuit chan struct{} // nil when there is no receiver; start and stop only
	rxDone chan struct{}

	frame []byte // header and frame in transit, in either direction
	stats NetStats

	sendFn  func(fd uintptr) // made once, so that a frame costs no allocation
	sending []byte
	sendErr error
}

// NewNet makes a network card.
func NewNet(cfg NetConfig) (*Net, error) {
	if cfg.MTU < netMinMTU {
		return nil, fmt.Errorf("network device: MTU %d is below %d", cfg.MTU, netMinMTU)
	}
	raw, err := cfg.Socket.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("network device: %w", err)
	}
	// Fails for a socket that the poller does not watch, i.e. a blocking one.
	if err := cfg.Socket.SetReadDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("network device: socket must be non-blocking: %w", err)
	}
	n := &Net{tx: newWorker(), mtu: int(cfg.MTU), socket: cfg.Socket, raw: raw, rxWake: make(chan struct{}, 1)}
	copy(n.config[0:], cfg.MAC[:])
	binary.LittleEndian.PutUint16(n.config[10:], cfg.MTU)
	n.frame = make([]byte, netHeaderLen+n.maxFrame()+1)
	n.sendFn = func(fd uintptr) { _, n.sendErr = unix.Write(int(fd), n.sending) }
	return n, nil
}

func (n *Net) maxFrame() int { return n.mtu + ethernetLen + vlanTagLen }

func (n *Net) Type() uint32                    { return TypeNet }
func (n *Net) Features() uint64                { return netMTU | netMAC }
func (n *Net) QueueSizes() []uint16            { return []uint16{netQueueSize, netQueueSize} }
func (n *Net) ReadConfig(off uint64, p []byte) { configRead(n.config[:], off, p) } // §5.1.4
func (n *Net) WriteConfig(uint64, []byte)      {}

func (n *Net) Activate(ctx DriverContext) error {
	if err := n.socket.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("network device: %w", err)
	}
	n.activate(ctx)
	n.tx.start(n.transmit)
	n.tx.wake()
	n.rxQuit, n.rxDone = make(chan struct{}), make(chan struct{})
	go n.receive(n.rxQuit, n.rxDone)
	return nil
}

// Notify takes no lock: it only wakes a goroutine.
func (n *Net) Notify(q int) {
	switch q {
	case netRx:
		n.wakeReceiver()
	case netTx:
		n.tx.wake()
	}
}

func (n *Net) wakeReceiver() {
	select {
	case n.rxWake <- struct{}{}:
	default:
	}
}

func (n *Net) Reset() {
	n.deactivate()
	n.tx.stop()
	if n.rxQuit == nil {
		return
	}
	close(n.rxQuit)
	// A deadline in the past wakes a receiver that waits in the poller. It can
	// only fail on a closed socket, which does not wait either.
	_ = n.socket.SetReadDeadline(time.Unix(1, 0))
	<-n.rxDone
	n.rxQuit, n.rxDone = nil, nil
}

func (n *Net) Resume() {
	n.unpause()
	n.tx.wake()
	n.wakeReceiver()
}

// Stats is a consistent view.
func (n *Net) Stats() NetStats {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.stats
}

// transmit sends one frame of the guest (§5.1.6.2) and reports whether to look
// for more.
func (n *Net) transmit() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	c, ok := n.pop(netTx)
	if !ok {
		return false
	}
	if n.send(c) {
		n.stats.TxFrames++
	} else {
		n.stats.TxDropped++
	}
	n.push(netTx, c.Head, 0)
	n.announce(netTx)
	return true
}

// send reports whether the frame left. Flags and segmentation types belong to
// offloads that were not negotiated: such a frame is not complete.
func (n *Net) send(c Chain) bool {
	length := size(c.Readable)
	if length < netHeaderLen+ethernetLen || length > uint64(netHeaderLen+n.maxFrame()) {
		return false
	}
	p := n.frame[:length]
	if _, err := gather(n.ctx.Mem, c.Readable, p); err != nil {
		return false
	}
	if p[0] != 0 || p[1] != 0 {
		return false
	}
	n.sending, n.sendErr = p[netHeaderLen:], nil
	if err := n.raw.Control(n.sendFn); err != nil || n.sendErr != nil {
		return false
	}
	n.stats.TxBytes += uint64(len(n.sending))
	return true
}

// receive moves frames from the socket to the guest until Reset, or until the
// other end has gone.
func (n *Net) receive(quit, done chan struct{}) {
	defer close(done)
	for {
		var next verdict
		if err := n.raw.Read(func(fd uintptr) bool {
			for {
				if next = n.deliver(int(fd)); next != again {
					return next != waitReadable
				}
			}
		}); err != nil || next == finished {
			return
		}
		select { // the guest has no buffer, or the device is paused
		case <-n.rxWake:
		case <-quit:
			return
		}
	}
}

// deliver moves one frame. It looks for a buffer first, so that a frame without
// one stays in the socket.
func (n *Net) deliver(fd int) verdict {
	n.mu.Lock()
	defer n.mu.Unlock()
	c, ok := n.pop(netRx)
	if !ok {
		return waitWake
	}
	clear(n.frame[:netHeaderLen])
	n.frame[netNumBuffers] = 1 // §5.1.6.4.1
	k, err := unix.Read(fd, n.frame[netHeaderLen:])
	switch {
	case errors.Is(err, unix.EINTR):
		n.ctx.Queues[netRx].Unpop()
		return again
	case errors.Is(err, unix.EAGAIN):
		n.ctx.Queues[netRx].Unpop()
		return waitReadable
	case err != nil, k == 0 && hungUp(fd):
		n.ctx.Queues[netRx].Unpop()
		return finished
	}
	total := netHeaderLen + k
	if k < ethernetLen || k > n.maxFrame() || uint64(total) > size(c.Writable) {
		n.ctx.Queues[netRx].Unpop()
		n.stats.RxDropped++
		return again
	}
	if _, err := scatter(n.ctx.Mem, c.Writable, n.frame[:total]); err != nil {
		n.fail(fmt.Errorf("queue %d: %w", netRx, err))
		return waitWake
	}
	n.push(netRx, c.Head, uint32(total))
	n.announce(netRx)
	n.stats.RxFrames++
	n.stats.RxBytes += uint64(k)
	return again
}
