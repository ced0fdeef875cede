// Package networktest plays the inside of sandboxes, for tests: a Linux kernel at the
// guest's end of a wire, and the host's network in a namespace of its own.
package networktest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/network/wire"
)

// Addresses of the interface of every sandbox.
var (
	MAC        = [6]byte{0x02, 0xa9, 0xe7, 0, 0, 2}
	GatewayMAC = [6]byte{0x02, 0xa9, 0xe7, 0, 0, 1}
	Address    = netip.MustParseAddr("10.255.255.2")
	Gateway    = netip.MustParseAddr("10.255.255.1")
	Address6   = netip.MustParseAddr("fd00:a9e7::2")
	Gateway6   = netip.MustParseAddr("fd00:a9e7::1")
)

// MTU is the MTU of that interface.
const MTU = 1500

// sendBuffer is the size of the send buffer of each end of a wire.
const sendBuffer = 4 << 20

// Guest is a Linux kernel at the guest's end of a wire. It is a network namespace
// with a tap, whose frames are copied to the wire and back, with checksum and
// segmentation offloads.
type Guest struct {
	ns   *os.File
	tap  *os.File
	near *os.File
	far  *os.File
	pump sync.WaitGroup
}

// New makes a guest with a wire. It ends with the test.
func New(t testing.TB) *Guest {
	t.Helper()
	g := &Guest{}
	if err := onThread(g.make); err != nil {
		t.Fatalf("play a guest: %v", err)
	}
	g.Connect(t)
	t.Cleanup(func() {
		_ = g.tap.Close() // both pumps end with their files
		g.Disconnect()
		if err := g.ns.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// NewWire makes a wire as engines do: unix datagrams, with room for large frames. Both
// ends are closed with the test.
func NewWire(t testing.TB) (near, far *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	near, far = os.NewFile(uintptr(fds[0]), "wire"), os.NewFile(uintptr(fds[1]), "wire")
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	for _, fd := range fds {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) == nil {
			continue
		}
		// A user other than root gets as much as the host allows.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer); err != nil {
			t.Fatal(err)
		}
	}
	return near, far
}

// Wire is the host's end of the wire. The guest owns it.
func (g *Guest) Wire() *os.File { return g.far }

// Connect gives the guest a new wire after Disconnect. Frames on the old wire are
// lost.
func (g *Guest) Connect(t testing.TB) {
	t.Helper()
	g.near, g.far = NewWire(t)
	g.Continue()
}

// Disconnect ends the wire at the guest's side.
func (g *Guest) Disconnect() {
	_ = g.near.Close()
	g.Pause()
}

// Pause stops the pump, as a pause of the sandbox would: the wire fills up.
func (g *Guest) Pause() {
	for _, f := range []*os.File{g.near, g.tap} {
		_ = f.SetDeadline(time.Unix(1, 0)) // a closed file needs none
	}
	g.pump.Wait()
	for _, f := range []*os.File{g.near, g.tap} {
		_ = f.SetDeadline(time.Time{})
	}
}

// Continue starts the pump.
func (g *Guest) Continue() {
	near := g.near
	g.pump.Go(func() { pump(near, g.tap) })
	g.pump.Go(func() { pump(g.tap, near) })
}

// pump moves messages until either side is closed, or its deadline passes.
func pump(to, from *os.File) {
	b := make([]byte, wire.MaxMessage+1)
	for {
		n, err := from.Read(b)
		if over(err) {
			return
		}
		if err != nil {
			continue // the other end is gone, and may come back
		}
		if _, err := to.Write(b[:n]); over(err) {
			return
		}
	}
}

func over(err error) bool {
	return errors.Is(err, os.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded)
}

// Run runs f on a thread in the guest. Sockets made by f belong to the guest.
func (g *Guest) Run(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(g.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the guest: %w", err)
		}
		return f()
	})
}

// Dial connects from inside the guest.
func (g *Guest) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = g.Run(func() (err error) {
		// Without a fallback address, no goroutine dials on another thread.
		c, err = (&net.Dialer{FallbackDelay: -1}).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// onThread runs f on a thread that is not reused afterwards.
func onThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- f()
	}()
	return <-result
}

// make makes the namespace. The calling thread is in it afterwards.
func (g *Guest) make() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	var err error
	if g.ns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return err
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	ifreq, err := unix.NewIfreq("eth0")
	if err != nil {
		return err
	}
	ifreq.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifreq); err != nil {
		return fmt.Errorf("TUNSETIFF: %w", err)
	}
	const offloads = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads); err != nil {
		return fmt.Errorf("TUNSETOFFLOAD: %w", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, wire.HeaderLen); err != nil {
		return fmt.Errorf("TUNSETVNETHDRSZ: %w", err)
	}
	// The file is made only now, because the runtime cannot wait for a tap without an
	// interface.
	g.tap = os.NewFile(uintptr(fd), "tap")
	for _, name := range []string{"accept_dad", "dad_transmits"} {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/eth0/"+name, []byte("0"), 0); err != nil {
			return err
		}
	}
	return configure()
}

// configure gives the interface in the calling thread's namespace its addresses.
func configure() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }() // only for ioctls
	s6, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s6) }()
	hardware := [40]byte{0: 'e', 1: 't', 2: 'h', 3: '0', 16: unix.ARPHRD_ETHER}
	copy(hardware[18:], MAC[:])
	if err := ioctl(s, unix.SIOCSIFHWADDR, unsafe.Pointer(&hardware)); err != nil {
		return err
	}
	index := uint32(0)
	for _, step := range []struct {
		request uint
		name    string
		set     func(*unix.Ifreq)
	}{
		{unix.SIOCSIFADDR, "eth0", func(r *unix.Ifreq) { _ = r.SetInet4Addr(Address.AsSlice()) }},
		{unix.SIOCSIFNETMASK, "eth0", func(r *unix.Ifreq) { _ = r.SetInet4Addr([]byte{255, 255, 255, 252}) }},
		{unix.SIOCSIFFLAGS, "lo", func(r *unix.Ifreq) { r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING) }},
		{unix.SIOCSIFFLAGS, "eth0", func(r *unix.Ifreq) { r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING) }},
		{unix.SIOCGIFINDEX, "eth0", func(*unix.Ifreq) {}},
	} {
		r, err := unix.NewIfreq(step.name)
		if err != nil {
			return err
		}
		step.set(r)
		if err := unix.IoctlIfreq(s, step.request, r); err != nil {
			return fmt.Errorf("ioctl %#x: %w", step.request, err)
		}
		index = r.Uint32()
	}
	return route(s, s6, index)
}

// route adds default routes through the gateway.
func route(s, s6 int, index uint32) error {
	// struct rtentry: a default route by way of the gateway.
	var four [120]byte
	binary.NativeEndian.PutUint16(four[8:], unix.AF_INET)
	binary.NativeEndian.PutUint16(four[24:], unix.AF_INET)
	copy(four[28:], Gateway.AsSlice())
	binary.NativeEndian.PutUint16(four[40:], unix.AF_INET)
	binary.NativeEndian.PutUint16(four[56:], unix.RTF_UP|unix.RTF_GATEWAY)
	if err := ioctl(s, unix.SIOCADDRT, unsafe.Pointer(&four)); err != nil {
		return err
	}
	// struct in6_ifreq and struct in6_rtmsg.
	var address [24]byte
	copy(address[:], Address6.AsSlice())
	binary.NativeEndian.PutUint32(address[16:], 126)
	binary.NativeEndian.PutUint32(address[20:], index)
	if err := ioctl(s6, unix.SIOCSIFADDR, unsafe.Pointer(&address)); err != nil {
		return err
	}
	var six [80]byte
	copy(six[32:], Gateway6.AsSlice())
	binary.NativeEndian.PutUint32(six[56:], 1024)
	binary.NativeEndian.PutUint32(six[72:], unix.RTF_UP|unix.RTF_GATEWAY)
	binary.NativeEndian.PutUint32(six[76:], index)
	if err := ioctl(s6, unix.SIOCADDRT, unsafe.Pointer(&six)); err != nil {
		return err
	}
	return waitForAddresses()
}

// waitForAddresses waits until the calling thread's namespace uses its IPv6
// addresses. That takes a moment after they are set. Until then the kernel chooses
// other source addresses.
func waitForAddresses() error {
	const tentative = 0x40
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		// /proc/net is the namespace of the process's first thread.
		b, err := os.ReadFile("/proc/thread-self/net/if_inet6")
		if err != nil {
			return err
		}
		usable := strings.Contains(string(b), "fd00a9e7")
		for line := range strings.Lines(string(b)) {
			flags, err := strconv.ParseUint(strings.Fields(line)[4], 16, 32)
			if err != nil {
				return err
			}
			usable = usable && flags&tentative == 0
		}
		if usable {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("addresses stay tentative:\n%s", b)
		}
	}
}

// ioctl passes a pointer to a structure of the size that the request implies.
func ioctl(fd int, request uint, p unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(p)); errno != 0 {
		return fmt.Errorf("ioctl %#x: %w", request, errno)
	}
	return nil
}
