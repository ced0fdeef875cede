package networktest_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/network/networktest"
	"agentrun.dev/internal/network/wire"
)

// TestKnowGateway: a guest that knows its gateway sends a packet before its question
// for the gateway's MAC is answered. No answer comes here.
func TestKnowGateway(t *testing.T) {
	for network, to := range map[string]string{"udp4": "198.51.100.7:9", "udp6": "[2001:db8::7]:9"} {
		t.Run(network, func(t *testing.T) {
			g := networktest.New(t)
			g.KnowGateway(t)
			c, err := g.Dial(t.Context(), network, to)
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.Write([]byte("hello"))
			if err := errors.Join(err, c.Close()); err != nil {
				t.Fatal(err)
			}
			if err := g.Wire().SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			for b := make([]byte, wire.MaxMessage); ; {
				n, err := g.Wire().Read(b)
				if err != nil {
					t.Fatalf("the packet has not come: %v\n%s", err, g.State())
				}
				frame := b[wire.HeaderLen:n]
				if isQuestion(frame) {
					t.Fatalf("it asks for the gateway's MAC\n%s", g.State())
				}
				if bytes.HasSuffix(frame, []byte("hello")) {
					if !bytes.Equal(frame[:6], networktest.GatewayMAC[:]) {
						t.Errorf("the packet goes to %x", frame[:6])
					}
					return
				}
			}
		})
	}
}

// isQuestion says whether a frame is an ARP request or a neighbour solicitation.
func isQuestion(frame []byte) bool {
	const arp, ipv6, icmpv6, solicitation = 0x0806, 0x86dd, 58, 135
	switch packet := frame[wire.EthernetLen:]; binary.BigEndian.Uint16(frame[12:]) {
	case arp:
		return true
	case ipv6:
		return packet[6] == icmpv6 && packet[40] == solicitation
	default:
		return false
	}
}

// TestState: the state of a guest has its neighbours and its interface.
func TestState(t *testing.T) {
	g := networktest.New(t)
	g.KnowGateway(t)
	const permanent = "0x6"
	for _, want := range []string{" bytes to the host, ", networktest.Gateway.String(), permanent, "eth0"} {
		if got := g.State(); !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}
