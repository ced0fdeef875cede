package microvm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/wire"
)

// TestNetwork: the guest's frames reach the other end of the wire, and frames
// from there reach the guest. The test answers its ping with a few lines of ARP
// and ICMP.
func TestNetwork(t *testing.T) {
	g := boot(t, 2, func(s *engine.Spec) {
		s.Network = &engine.Network{
			MAC: [6]byte{0x02, 0, 0, 0, 0, 1}, MTU: 1500,
			Address: netip.MustParsePrefix("10.0.2.15/24"), Gateway: netip.MustParseAddr("10.0.2.2"),
		}
	})
	ours, err := g.Wire()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- answer(ours) }()
	g.sh(t, "ping -c 3 -s 1400 -W 20 10.0.2.2")
	if got := g.sh(t, "cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu"); got != "02:00:00:00:00:01\n1500" {
		t.Errorf("address and MTU are %q", got)
	}
	// Small frames would make a slow connection slower.
	if got := g.sh(t, "cat /proc/sys/net/ipv4/tcp_min_tso_segs"); got != "255" {
		t.Errorf("frames of TCP have at least %s segments", got)
	}
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("the wire ended with %v", err)
	}
}

// answer plays the host 10.0.2.2 until its end of the wire is closed.
func answer(file *os.File) error {
	our := []byte{0x02, 0, 0, 0, 0, 2}
	message := make([]byte, wire.MaxMessage)
	for {
		n, err := file.Read(message)
		if err != nil {
			return err
		}
		h, f, err := wire.Parse(message[:n])
		if err != nil {
			return err
		}
		if h.Complete(f); len(f) < 42 {
			continue
		}
		switch binary.BigEndian.Uint16(f[12:]) {
		case 0x0806: // ARP: who has …?
			if !bytes.Equal(f[38:42], []byte{10, 0, 2, 2}) {
				continue
			}
			binary.BigEndian.PutUint16(f[20:], 2) // reply
			copy(f[32:42], f[22:32])              // to the asker
			copy(f[22:], our)
			copy(f[28:], []byte{10, 0, 2, 2})
		case 0x0800: // IPv4: echo back an ICMP echo request
			if f[23] != 1 || f[34] != 8 {
				continue
			}
			var src [4]byte
			copy(src[:], f[26:30])
			copy(f[26:30], f[30:34])
			copy(f[30:34], src[:])
			f[34] = 0
			// Type went from 8 to 0, so the ones' complement sum grows by 0x800.
			sum := uint32(binary.BigEndian.Uint16(f[36:])) + 0x0800
			binary.BigEndian.PutUint16(f[36:], uint16(sum+sum>>16))
		default:
			continue
		}
		copy(f[0:6], f[6:12])
		copy(f[6:12], our)
		wire.Header{}.Put(message) // the receiver need not complete anything
		if _, err := file.Write(message[:n]); err != nil {
			return err
		}
	}
}
