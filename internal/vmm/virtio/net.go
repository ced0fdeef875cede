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

// Feature bits, virtio 1.2 §5.1.3. The Guest bits tell which offloads the guest
// accepts, the Host bits which it may use for its own frames.
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
	// Without num_buffers it is the header of a message on a wire.
	netHeaderLen = wire.HeaderLen + 2
	netConfigLen = 12
	vlanTagLen   = 4
	// netMinMTU is the smallest MTU that §5.1.4.1 allows a device to announce.
	netMinMTU = 68
)

// NetConfig configures a Net device.
type NetConfig struct {
	MAC [6]byte
	MTU uint16
	// Socket is a non-blocking unix socket that preserves message boundaries
	// (SOCK_DGRAM or SOCK_SEQPACKET). Package wire describes the messages. The
	// caller closes the socket after the device was reset.
	Socket *os.File
}

// NetStats counts frames; the directions are the guest's.
type NetStats struct {
	RxFrames, RxBytes, RxDropped uint64
	TxFrames, TxBytes, TxDropped uint64
}

// Net is a network card, virtio 1.2 §5.1, with one pair of queues.
//
// Frames go from guest memory to the socket and back by one system call each,
// without a copy in this process. In both directions the side that cannot accept
// a frame makes the other one wait: if the socket is full, frames stay in the
// guest's queue; if the guest has no buffers, they stay in the socket. Frames
// that the receiver could never accept are dropped and counted.
//
// A guest gets only frames that it can handle by the negotiated features. If a
// frame needs an offload that the guest has not accepted, the device completes
// the checksum or segments the frame, in a buffer that exists only meanwhile.
type Net struct {
	core

	config [netConfigLen]byte // constant
	mtu    int                // constant

	rx, tx *pump // constant

	// plug protects all following fields. Activate, Reset and Plug hold it
	// while they wait for both pumps, which never take it.
	plug    sync.Mutex
	socket  *os.File
	raw     syscall.RawConn
	pumping bool // from Activate to Reset

	// mu protects the fields below.
	stats NetStats
	// unannounced counts frames that were sent and not yet announced to the guest.
	unannounced int
	held        *heldFrame // a frame that the guest gets in parts, or nil
	head        [netHeaderLen]byte
	// The guest's buffers for one frame, and the pieces of which they consist.
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

// use makes socket the device's socket.
func (n *Net) use(socket *os.File) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return fmt.Errorf("network device: %w", err)
	}
	// This fails for a socket that the poller does not watch, such as a
	// blocking one.
	if err := socket.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("network device: socket must be non-blocking: %w", err)
	}
	n.socket, n.raw = socket, raw
	return nil
}

// maxFrame is the length of the longest frame that needs no segmentation.
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

// startPumps starts moving frames. The caller holds plug.
func (n *Net) startPumps() {
	n.rx.start(n.raw.Read, n.deliver)
	n.tx.start(n.raw.Write, n.transmit)
	n.pumping = true
}

// stopPumps returns when no frame is moving any more. The caller holds plug.
func (n *Net) stopPumps() {
	if !n.pumping {
		return
	}
	n.rx.leave()
	n.tx.leave()
	// A deadline in the past wakes pumps that wait in the poller. It can fail
	// only for a closed socket, for which no pump waits.
	_ = n.socket.SetDeadline(time.Unix(1, 0))
	n.rx.wait()
	n.tx.wait()
	n.pumping = false
}

// Plug switches the device to another socket and returns the old one, which the
// caller closes; messages in it are lost. After an error the device keeps the
// old socket.
func (n *Net) Plug(socket *os.File) (old *os.File, err error) {
	n.plug.Lock()
	defer n.plug.Unlock()
	old = n.socket
	pumped := n.pumping
	n.stopPumps()
	if err = n.use(socket); err != nil {
		// It had no deadline before. If it is closed, no frame moves anyway.
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

// Notify waits for no lock. Work that it cannot do at once it leaves to a
// goroutine.
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

// release frees the memory that was used for a driver.
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

// Stats returns consistent counters.
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

// start calls step with the socket's descriptor. poll is a method of the
// socket's syscall.RawConn: each time the socket is ready it calls a function,
// until the function returns true.
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
			select { // wait for the guest, or until the device continues
			case <-p.kick:
			case <-quit:
				return
			}
		}
	}()
}

// leave makes the pump end after the current frame. The caller must wake a pump
// that waits in the poller.
func (p *pump) leave() { close(p.quit) }

func (p *pump) wait() { <-p.done }
