package netd

import (
	"log/slog"
	"net/netip"
	"os"
	"testing"

	"agentrun.dev/internal/network/egress"
	"agentrun.dev/internal/network/netctl"
)

type nobody struct{}

func (nobody) Owns(netip.Addr) (bool, string, error) { return false, "", nil }

// TestNothingIsLeftOfAWireThatFailed: if a wire cannot be attached, its sandbox's way
// out ends.
func TestNothingIsLeftOfAWireThatFailed(t *testing.T) {
	s, err := New(Config{Host: nobody{}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = s.poller.Close()
		s.resolver.Close()
	}()
	file, err := os.Open(os.DevNull) // it is not a socket
	if err != nil {
		t.Fatal(err)
	}
	w := netctl.Wire{ID: "w", MTU: 1500, Address: netip.MustParseAddr("10.255.255.2"), Gateway: netip.MustParseAddr("10.255.255.1")}
	if _, err := s.open(w, egress.Rules{}, file); err == nil {
		t.Error("a file that is no wire is served")
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.open(w, egress.Rules{}, file); err == nil {
		t.Error("a closed file is served")
	}
	if n := s.gateway.Sandboxes(); n != 0 {
		t.Errorf("the gateway keeps %d sandboxes", n)
	}
}
