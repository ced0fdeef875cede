package virtio

import (
	"encoding/binary"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"agentrun.dev/internal/network/wire"
	"agentrun.dev/internal/vmm/guestmem"
)

// Feature bits, virtio 1.2 §5.1.3. Those of the guest say what it takes, those of
// the host what it may send.
const (
	netCsum      = 1 << 0
	netGuestCsum = 1 << 1
	netMTU       = 1 << 3
	netMAC       = 1 << 5
	netGuestTSO4 = 1 << 7
	netGuestTSO6 = 1 << 8
	netHostTSO4  = 1 << 11
	netHostTSO6  = 1 << 12
	netMergeable = 1 << 15 // VIRTIO_NET_F_MRG_RXBUF
	netOffloads  = netCsum | netGuestCsum | netGuestTSO4 | netGuestTSO6 | netHostTSO4 | netHostTSO6
	netFeatures  = netOffloads | netMergeable | netMTU | netMAC
)

// Queues, §5.1.2.
const (
	netRx = iota
	netTx
)

const (
	netQueueSize = 256
	// netHeaderLen is the size of struct virtio_net_hdr with num_buffers, §5.1.6.
	// Without that it is the header of a message on a wire.
	netHeaderLen = wire.HeaderLen + 2
	netConfigLen = 12
	vlanTagLen   = 4
	// netMinMTU is the least §5.1.4.1 allows a device to announce.
	netMinMTU = 68
)

// NetConfig says what a Net device shows to its guest and where frames go.
type NetConfig struct {
	MAC [6]byte
	MTU uint16
	// Socket is a non-blocking unix socket that keeps messages apart
	// (SOCK_DGRAM or SOCK_SEQPACKET), each as package wire describes it. The
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
// Frames go from guest memory to the socket and back by one system call each,
// without a copy in this process. In both directions the side that cannot take a
// frame makes the other one wait: when the socket is full, frames stay in the
// guest's queue; when the guest has no buffers, they stay in the socket. What
// neither side could ever take is dropped and counted.
//
// A guest gets what it has negotiated, and no more. Frames that leave something
// to do which the guest has not promised to do are completed and cut up here,
// from a buffer that exists only meanwhile.
type Net struct {
	core

	config [netConfigLen]byte // constant
	mtu    int                // constant

	rx, tx *pump // constant

	// plug protects all following fields. Activate, Reset and Plug hold it, and
	// wait for both pumps, which never take it.
	plug    sync.Mutex
	socket  *os.File
	raw     syscall.RawConn
	pumping bool // from Activate to Reset

	// The fields below belong to who holds mu.
	stats NetStats
	// unannounced counts frames that were sent and that the guest has not been told of.
	unannounced int
	held        *heldFrame // a frame that is handed to the guest in parts, or nil
	head        [netHeaderLen]byte
	// Buffers of the guest for one frame, and the pieces that they are made of.
	buffers []usedBuffer
	pieces  []guestmem.Range
}

// NewNet makes a network card.
func NewNet(cfg NetConfig) (*Net, error) {
	if cfg.MTU < netMinMTU {
		return nil, fmt.Errorf("network device: MTU %d is below %d", cfg.MTU, netMinMTU)
	}
	n := &Net{mtu: int(cfg.MTU), rx: newPump(), tx: newPump()}
	if err := n.use(cfg.Socket); err != nil {
		return nil, err
	}
	copy(n.config[0:], cfg.MAC[:])
	binary.LittleEndian.PutUint16(n.config[10:], cfg.MTU)
	return n, nil
}

// use makes a socket the device's.
func (n *Net) use(socket *os.File) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return fmt.Errorf("network device: %w", err)
	}
	// Fails for a socket that the poller does not watch, i.e. a blocking one.
	if err := socket.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("network device: socket must be non-blocking: %w", err)
	}
	n.socket, n.raw = socket, raw
	return nil
}

// maxFrame is the longest frame that is not to be cut up.
func (n *Net) maxFrame() int { return n.mtu + wire.EthernetLen + vlanTagLen }

func (n *Net) Type() uint32                    { return TypeNet }
func (n *Net) Features() uint64                { return netFeatures }
func (n *Net) QueueSizes() []uint16            { return []uint16{netQueueSize, netQueueSize} }
func (n *Net) ReadConfig(off uint64, p []byte) { configRead(n.config[:], off, p) } // §5.1.4
func (n *Net) WriteConfig(uint64, []byte)      {}

func (n *Net) Activate(ctx DriverContext) error {
	n.plug.Lock()
	defer n.plug.Unlock()
	if err := n.socket.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("network device: %w", err)
	}
	n.activate(ctx)
	n.startPumps()
	return nil
}

// startPumps begins to move frames. The caller holds plug.
func (n *Net) startPumps() {
	n.rx.start(n.raw.Read, n.deliver)
	n.tx.start(n.raw.Write, n.transmit)
	n.pumping = true
}

// stopPumps returns when no frame moves any more. The caller holds plug.
func (n *Net) stopPumps() {
	if !n.pumping {
		return
	}
	n.rx.leave()
	n.tx.leave()
	// A deadline in the past wakes pumps that wait in the poller. It can only
	// fail on a closed socket, which does not wait either.
	_ = n.socket.SetDeadline(time.Unix(1, 0))
	n.rx.wait()
	n.tx.wait()
	n.pumping = false
}

// Plug makes frames go to another socket from now on, and returns the one that
// the device had, whose messages nobody reads any more. The caller closes it.
// After an error the device has what it had.
func (n *Net) Plug(socket *os.File) (old *os.File, err error) {
	n.plug.Lock()
	defer n.plug.Unlock()
	old = n.socket
	pumped := n.pumping
	n.stopPumps()
	if err = n.use(socket); err != nil {
		// It had none before, and may be closed: then nothing moves.
		_ = old.SetDeadline(time.Time{})
	}
	if pumped {
		n.startPumps()
	}
	if err != nil {
		return nil, err
	}
	return old, nil
}

// Notify waits for no lock: what it cannot do at once it leaves to a goroutine.
func (n *Net) Notify(q int) {
	switch q {
	case netRx:
		n.rx.wake()
	case netTx:
		if !n.transmitNow() {
			n.tx.wake()
		}
	}
}

func (n *Net) Reset() {
	n.deactivate()
	n.plug.Lock()
	defer n.plug.Unlock()
	n.stopPumps()
	n.release()
}

// release forgets what was made for a driver.
func (n *Net) release() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.held, n.buffers, n.pieces, n.unannounced = nil, nil, nil, 0
}

func (n *Net) Resume() {
	n.unpause()
	n.tx.wake()
	n.rx.wake()
}

// Stats is a consistent view.
func (n *Net) Stats() NetStats {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.stats
}

// negotiated reports whether the driver accepted all of these features.
func (n *Net) negotiated(bits uint64) bool { return n.ctx.Features&bits == bits }

// pump is a goroutine that moves frames in one direction.
type pump struct {
	kick chan struct{} // holds at most one wake-up
	quit chan struct{} // closed by leave
	done chan struct{} // closed at its end
}

func newPump() *pump { return &pump{kick: make(chan struct{}, 1)} }

// wake makes the pump look again. It never blocks and takes no lock.
func (p *pump) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// start begins to call step with the socket's descriptor. poll is a method of
// the socket's syscall.RawConn: it calls a function again when the socket is
// ready, until that returns true.
func (p *pump) start(poll func(func(fd uintptr) bool) error, step func(fd int) verdict) {
	quit, done := make(chan struct{}), make(chan struct{})
	p.quit, p.done = quit, done
	go func() {
		defer close(done)
		for {
			var next verdict
			if err := poll(func(fd uintptr) bool {
				for next = again; next == again; {
					select {
					case <-quit:
						return true
					default:
						next = step(int(fd))
					}
				}
				return next != waitSocket
			}); err != nil || next == finished {
				return
			}
			select { // for the guest, or until the device goes on
			case <-p.kick:
			case <-quit:
				return
			}
		}
	}()
}

// leave makes the pump end when it has moved the frame at hand. A pump that waits
// in the poller is to be woken.
func (p *pump) leave() { close(p.quit) }

func (p *pump) wait() { <-p.done }
