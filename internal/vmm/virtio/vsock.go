package virtio

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Context identifiers, virtio 1.2 §5.10.4.
const (
	HostCID  = 2
	GuestCID = 3
)

// Queues, §5.10.2.
const (
	vsockRx = iota
	vsockTx
	vsockEvent
)

const (
	vsockQueueSize = 128
	// VsockBuffer is the credit that each connection grants the guest, and so
	// the most that the host buffers for it.
	VsockBuffer = 256 << 10
	// MaxVsockConns bounds the connections of one guest, and with them its
	// goroutines, descriptors and buffers in the host.
	MaxVsockConns = 256
	// vsockMaxResets bounds the replies to packets without a connection, which
	// wait until the guest gives receive buffers.
	vsockMaxResets = MaxVsockConns
	vsockMaxData   = 64 << 10 // payload moved at a time
	// Linux picks its own ports below 2^31 at random and listens on small ones;
	// the host uses ports in between for its ends.
	vsockFirstPort = 1 << 30
	vsockLastPort  = 1<<31 - 1
	// vsockCloseTimeout is how long a guest may take to confirm a close (§5.10.6.5); the
	// value is Linux's.
	vsockCloseTimeout = 8 * time.Second
	// vsockLazyBytes: see Vsock.finishTx.
	vsockLazyBytes = 256 << 10
)

// Errors that Connect passes to result.
var (
	ErrVsockReset    = errors.New("vsock connection reset")
	ErrVsockNotReady = errors.New("vsock driver is not ready")
	ErrVsockBusy     = errors.New("too many vsock connections")
	ErrVsockCanceled = errors.New("vsock connect canceled")
)

// VsockConfig configures a Vsock device.
type VsockConfig struct {
	// Accept is called when the guest connects to a port. It returns the host's
	// end of the connection: one end of a non-blocking unix stream socket pair,
	// which the device takes over. It runs in a vCPU thread with the device's
	// lock held, so it must not block and must not call the device. Nil refuses
	// all connections.
	Accept func(port uint32) (conn *os.File, ok bool)
	// CloseTimeout bounds the wait for a guest to confirm a close; 0 means 8 s.
	CloseTimeout time.Duration
}

// VsockStats counts packets; the directions are the guest's.
type VsockStats struct {
	Connections        int // now
	RxPackets, RxBytes uint64
	TxPackets, TxBytes uint64
	Dropped            uint64 // malformed packets, and replies without room
	Resets             uint64 // sent
}

// Vsock is the socket device, virtio 1.2 §5.10, for stream sockets between the
// guest and the host.
//
// Packets from the guest are handled inline and written straight to the host's
// socket. Data that does not fit waits in a buffer, within the connection's
// credit, and a goroutine that exists only meanwhile writes it out. For the
// other direction each connection has a goroutine that sleeps in the network
// poller or, without credit or receive buffers, on a channel.
type Vsock struct {
	core
	accept       func(uint32) (*os.File, bool)
	closeTimeout time.Duration
	wg           sync.WaitGroup // the goroutines of connections

	conns    map[connKey]*vsockConn
	nextPort uint32
	blocked  int // connections that wait for credit or receive buffers

	// Packets that wait for receive buffers: resets without a connection, and
	// connections with pending control packets, each at most once.
	resets  []vsockHeader
	talking []*vsockConn

	// standby is the connection that a copy of the guest continues, or the zero
	// key. gone are the other connections that the guest still believes in,
	// until it gets a RST for each (see vsock_standby.go).
	standby  connKey
	saved    VsockConnState // a standby that was not attached yet
	attached *vsockConn     // an attached standby on which the guest has not answered yet
	settled  func()         // see AttachStandby
	gone     []connKey

	rxDirty   bool   // receive buffers were used since the last announcement
	lazySlots uint32 // descriptors and bytes of transmit buffers that were
	lazyBytes uint64 // used and not announced

	callbacks []func() // results to report once the lock is released
	knocked   func()   // see WakeOn
	packet    []byte   // a packet in transit, in either direction
	stats     VsockStats

	controlPacket [vsockHeaderLen]byte // the same, for packets without payload
}

// NewVsock makes a socket device.
func NewVsock(cfg VsockConfig) *Vsock {
	d := &Vsock{accept: cfg.Accept, closeTimeout: cfg.CloseTimeout, conns: make(map[connKey]*vsockConn), nextPort: vsockFirstPort}
	if d.accept == nil {
		d.accept = func(uint32) (*os.File, bool) { return nil, false }
	}
	if d.closeTimeout == 0 {
		d.closeTimeout = vsockCloseTimeout
	}
	return d
}

func (d *Vsock) Type() uint32 { return TypeVsock }

// Features offers no bits: without them there are only stream sockets
// (§5.10.3).
func (d *Vsock) Features() uint64 { return 0 }
func (d *Vsock) QueueSizes() []uint16 {
	return []uint16{vsockQueueSize, vsockQueueSize, vsockQueueSize}
}

// ReadConfig reads struct virtio_vsock_config: the guest's CID, §5.10.4.
func (d *Vsock) ReadConfig(off uint64, p []byte) {
	var config [8]byte
	binary.LittleEndian.PutUint64(config[:], GuestCID)
	configRead(config[:], off, p)
}

func (d *Vsock) WriteConfig(uint64, []byte) {}

func (d *Vsock) Activate(ctx DriverContext) error {
	d.activate(ctx)
	d.scan()
	return nil
}

// unlock ends a critical section. It announces received packets, once for all
// of them, and reports results without the lock.
func (d *Vsock) unlock() {
	if !d.live {
		d.dropAll() // a broken ring also ends the connections
	}
	if c := d.attached; c != nil && (c.answered || c.closed) {
		d.settleGone()
		d.flush()
	}
	if d.rxDirty {
		d.rxDirty = false
		if d.announce(vsockRx) {
			d.lazySlots, d.lazyBytes = 0, 0 // the same line; see finishTx
		}
	}
	callbacks := d.callbacks
	d.callbacks = nil
	d.mu.Unlock()
	for _, f := range callbacks {
		f()
	}
}

// Reset closes all connections and waits for their goroutines.
func (d *Vsock) Reset() {
	d.deactivate()
	d.mu.Lock()
	d.standby, d.saved, d.attached, d.settled, d.gone = connKey{}, VsockConnState{}, nil, nil, nil
	d.rxDirty, d.lazySlots, d.lazyBytes = false, 0, 0
	d.unlock()
	d.wg.Wait()
}

// dropAll ends every connection without telling the guest.
func (d *Vsock) dropAll() {
	for _, c := range d.conns {
		c.drop(ErrVsockReset)
	}
	d.resets = d.resets[:0]
}

func (d *Vsock) Resume() {
	d.unpause()
	d.mu.Lock()
	d.knocked = nil
	d.settleGone()
	d.unlock()
	d.scan()
}

// scan acts as if the guest had notified each queue.
func (d *Vsock) scan() {
	for q := range d.QueueSizes() {
		d.Notify(q)
	}
}

func (d *Vsock) Notify(q int) {
	d.mu.Lock()
	defer d.unlock()
	if !d.running() {
		return
	}
	switch q {
	case vsockRx:
		d.flush()
		d.wakeBlocked()
	case vsockTx:
		d.serveTx()
		d.flush()
	case vsockEvent:
		// Its only event would reset all connections, including the standby.
	}
}

// wakeBlocked wakes connections that wait for receive buffers.
func (d *Vsock) wakeBlocked() {
	if d.blocked == 0 {
		return
	}
	for _, c := range d.conns {
		c.unblock()
	}
}

// Stats returns consistent counters.
func (d *Vsock) Stats() VsockStats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.stats
	s.Connections = len(d.conns)
	return s
}

// Connect opens a connection to a port on which the guest listens. conn is one
// end of a non-blocking unix stream socket pair, which the device takes over
// and closes. result is called once, from any goroutine and perhaps before
// Connect returns, with nil when the guest has accepted. It must not block and
// must not call the transport. cancel gives up (a guest may never answer) or,
// later, aborts the connection.
func (d *Vsock) Connect(port uint32, conn *os.File, result func(error)) (cancel func()) {
	return d.connect(port, conn, false, result)
}

func (d *Vsock) connect(port uint32, conn *os.File, standby bool, result func(error)) (cancel func()) {
	d.mu.Lock()
	defer d.unlock()
	refuse := func(err error) func() {
		d.callbacks = append(d.callbacks, func() {
			_ = conn.Close() // no data was written to it
			result(err)
		})
		return func() {}
	}
	if !d.live {
		return refuse(ErrVsockNotReady)
	}
	if len(d.conns) >= MaxVsockConns {
		return refuse(ErrVsockBusy)
	}
	c, err := d.newConn(connKey{host: d.pickPort(port), guest: port}, conn)
	if err != nil {
		return refuse(err)
	}
	if standby {
		d.standby = c.key
	}
	c.result = result
	c.say(sayRequest)
	d.flush()
	d.used()
	return func() {
		d.mu.Lock()
		defer d.unlock()
		c.abort(ErrVsockCanceled)
		d.flush()
	}
}

// pickPort finds a free host port for a connection to a guest port. There are
// more ports than connections, so the search ends.
func (d *Vsock) pickPort(guest uint32) uint32 {
	for {
		p := d.nextPort
		if d.nextPort++; d.nextPort > vsockLastPort {
			d.nextPort = vsockFirstPort
		}
		if _, taken := d.conns[connKey{host: p, guest: guest}]; !taken {
			return p
		}
	}
}

// shutdownSocket closes a direction; the error does not matter, as a socket
// that is already gone cannot be used either.
func shutdownSocket(fd uintptr, how int) { _ = unix.Shutdown(int(fd), how) }
