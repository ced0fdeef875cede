package enginetest

import (
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
)

// openConnection starts a program with a TCP connection to the lan. The program sends
// everything that is written to /run/to, and stores everything that it receives in
// /run/from.
const openConnection = `
mkfifo /run/to
(exec 3<>/run/to; exec nc 10.0.2.2 7 <&3 >/run/from 2>/dev/null) </dev/null >/dev/null 2>&1 &
echo $! > /run/nc
echo first > /run/to
while ! grep -q first /run/from; do usleep 1000; done`

// endConnection waits until that program has ended in a fork, and prints the bytes
// that it received. Opening the queue with <> succeeds even if its reader has gone
// already.
const endConnection = `
exec 3<>/run/to
echo mine >&3
while kill -0 $(cat /run/nc) 2>/dev/null; do usleep 1000; done
cat /run/from`

// look prints the interface as programs see it.
const look = `ip addr show dev eth0; ip route; cat /etc/resolv.conf; grep : /proc/net/dev | cut -d: -f1 | tr -d ' ' | sort | tr '\n' ' '; echo`

// lookUp asks the DNS server for a name. The answer identifies the lan.
func lookUp(name string) string {
	return "nslookup " + name + ".test | grep -o '10[.]9[.]8[.][0-9]*' | tail -n1"
}

// bootWired boots a sandbox with an interface.
func (s *suite) bootWired(t *testing.T) engine.Sandbox {
	t.Helper()
	spec := s.Spec
	spec.Network = lanNetwork()
	sb, err := s.Engine.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sb.Close() })
	return sb
}

// testNetwork: a sandbox has the interface that was asked for. Its frames go to its
// own wire and to no other, and whoever holds the other end is its network. Forks
// keep its addresses. A fork whose wire nobody holds reaches nobody.
func (s *suite) testNetwork(t *testing.T) {
	source := s.bootWired(t)
	home := newLAN(t, source, 1)
	home.isReached(t, source, "source")
	// Frames of the maximum length, and more of them than any buffer holds.
	sh(t, source, "ping -c 1 -s 1372 -W 60 10.0.2.2 && head -c 200000 /dev/urandom > /blob && nc 10.0.2.2 7 < /blob | cmp - /blob && "+openConnection)

	snap, err := source.Snapshot(t.Context(), filepath.Join(s.dir, "wired"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	fork := s.fork(t, snap, engine.ForkOptions{})
	away := newLAN(t, fork, 2)
	away.isReached(t, fork, "fork")
	isReset(t, fork)

	children, _ := liveFork(t, source, engine.ForkOptions{}, engine.ForkOptions{})
	live := newLAN(t, children[0], 3)
	live.isReached(t, children[0], "child")
	isReset(t, children[0])
	grandchildren, _ := liveFork(t, fork, engine.ForkOptions{})
	farther := newLAN(t, grandchildren[0], 4)
	farther.isReached(t, grandchildren[0], "grandchild")
	isAlone(t, children[1])
	isAlone(t, s.fork(t, snap, engine.ForkOptions{}))

	// The source kept its own network all the time, and its connection goes on.
	sh(t, source, "echo second > /run/to; while ! grep -q second /run/from; do usleep 1000; done")
	home.isReached(t, source, "again")
	for _, l := range []struct {
		*lan
		names []string
	}{{home, []string{"source.test", "again.test"}}, {away, []string{"fork.test"}}, {live, []string{"child.test"}}, {farther, []string{"grandchild.test"}}} {
		if got := slices.Compact(l.asked()); !slices.Equal(got, l.names) {
			t.Errorf("%v: names %q arrived, not %q", l.answer, got, l.names)
		}
	}
	if got := home.dialed(); len(got) != 6 {
		t.Errorf("connections from the source: %q", got)
	}
}

// sees checks the interface that programs see, and returns the rest of the output.
func sees(t *testing.T, got string) string {
	t.Helper()
	const last = "\neth0 lo" // the list of all interfaces
	for _, want := range []string{"02:00:00:00:00:0f", "mtu 1400", lanNetwork().Address.String(), lanNetwork().Address6.String(), "default via 10.0.2.2 dev eth0", "10.0.2.0/24 dev eth0", "nameserver 10.0.2.3", "nameserver fd00:a9e7::3", last} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in what programs see:\n%s", want, got)
		}
	}
	_, rest, _ := strings.Cut(got, last)
	return strings.TrimSpace(rest)
}

// isReached checks that the sandbox is at the other end of the lan's wire: its
// interface is right, the lan answers its question for a name, and its connections
// come through the gateways.
func (l *lan) isReached(t *testing.T, sb engine.Sandbox, name string) {
	t.Helper()
	got := sees(t, sh(t, sb, look+"; "+lookUp(name)+"; echo hello from "+name+" | nc -w 60 192.0.2.7 7; echo six from "+name+" | nc -w 60 2001:db8::7 7"))
	if want := netip.AddrFrom4(l.answer).String() + "\nhello from " + name + "\nsix from " + name; got != want {
		t.Errorf("%s got %q, not %q", name, got, want)
	}
	if got := l.dialed(); !slices.Contains(got, "192.0.2.7:7") || !slices.Contains(got, "[2001:db8::7]:7") {
		t.Errorf("connections from %s: %q", name, got)
	}
}

// isAlone checks that a sandbox has its interface, and that nobody holds the other
// end of its wire.
func isAlone(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	got := sees(t, sh(t, sb, look+"; timeout 1 "+lookUp("nobody")+"; nc -w 1 10.0.2.2 7 </dev/null 2>/dev/null && echo connected; ping -c 1 -W 1 10.0.2.2 >/dev/null 2>&1 && echo answered; echo nobody"))
	if got != "nobody" {
		t.Errorf("with nobody at its wire: %q", got)
	}
}

// isReset checks that the source's open connection is closed in a fork.
func isReset(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	if got := sh(t, sb, endConnection); got != "first" {
		t.Errorf("over the source's connection came %q", got)
	}
}

// testNetworkRefuses: a sandbox without an interface has no wire, and invalid
// interfaces are refused.
func (s *suite) testNetworkRefuses(t *testing.T) {
	if wire, err := s.fork(t, s.warm, engine.ForkOptions{}).Wire(); !errors.Is(err, engine.ErrNoWire) {
		t.Errorf("the wire of a sandbox without an interface: %v, %v", wire, err)
	}
	for name, change := range map[string]func(*engine.Spec){
		"many devices":  func(spec *engine.Spec) { spec.Network.MAC[0] = 3 },
		"no address":    func(spec *engine.Spec) { spec.Network.Address = netip.Prefix{} },
		"no frames":     func(spec *engine.Spec) { spec.Network.MTU = 0 },
		"IPv6 for IPv4": func(spec *engine.Spec) { spec.Network.Address6 = spec.Network.Address },
		"far gateway":   func(spec *engine.Spec) { spec.Network.Gateway = netip.AddrFrom4([4]byte{192, 0, 2, 1}) },
	} {
		spec := s.Spec
		spec.Network = lanNetwork()
		change(&spec)
		if sb, err := s.Engine.Boot(t.Context(), spec); err == nil {
			t.Errorf("%s: it was booted", name)
			_ = sb.Close()
		}
	}
}
