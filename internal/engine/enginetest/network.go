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

// openConnection leaves a program with a TCP connection to the lan, which sends
// what is written to /run/to and keeps what comes in /run/from.
const openConnection = `
mkfifo /run/to
(exec 3<>/run/to; exec nc 10.0.2.2 7 <&3 >/run/from 2>/dev/null) </dev/null >/dev/null 2>&1 &
echo $! > /run/nc
echo first > /run/to
while ! grep -q first /run/from; do usleep 1000; done`

// endConnection waits until that is over in a fork, and shows what came. Opened
// so, the queue takes something even if its reader has gone already.
const endConnection = `
exec 3<>/run/to
echo mine >&3
while kill -0 $(cat /run/nc) 2>/dev/null; do usleep 1000; done
cat /run/from`

// look shows what programs see of the interface.
const look = `ip addr show dev eth0; ip route; cat /etc/resolv.conf; grep : /proc/net/dev | cut -d: -f1 | tr -d ' ' | sort | tr '\n' ' '; echo`

// lookUp asks the DNS server for a name; its answer says which lan it is.
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

// testNetwork: a sandbox has the interface that was asked for, its frames go to
// its own wire and to no other, and whoever is there is its network. Forks keep
// its addresses; a fork at whose wire is nobody reaches nobody.
func (s *suite) testNetwork(t *testing.T) {
	source := s.bootWired(t)
	home := newLAN(t, source, 1)
	home.isReached(t, source, "source")
	// Frames as long as they may be, and more of them than any buffer holds.
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

	// All the time, the source had its own, and its connection goes on.
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

// sees checks what programs see of the interface, and returns the rest.
func sees(t *testing.T, got string) string {
	t.Helper()
	const last = "\neth0 lo" // all interfaces
	for _, want := range []string{"02:00:00:00:00:0f", "mtu 1400", lanNetwork().Address.String(), lanNetwork().Address6.String(), "default via 10.0.2.2 dev eth0", "10.0.2.0/24 dev eth0", "nameserver 10.0.2.3", "nameserver fd00:a9e7::3", last} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in what programs see:\n%s", want, got)
		}
	}
	_, rest, _ := strings.Cut(got, last)
	return strings.TrimSpace(rest)
}

// isReached checks that a sandbox is at the other end: its interface, that a name
// is answered from here, and that connections come by the gateways.
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

// isAlone checks that a sandbox has its interface, and that nobody is there.
func isAlone(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	got := sees(t, sh(t, sb, look+"; timeout 1 "+lookUp("nobody")+"; nc -w 1 10.0.2.2 7 </dev/null 2>/dev/null && echo connected; ping -c 1 -W 1 10.0.2.2 >/dev/null 2>&1 && echo answered; echo nobody"))
	if got != "nobody" {
		t.Errorf("with nobody at its wire: %q", got)
	}
}

// isReset checks that the connection which the source had open when it was forked
// is none in the fork.
func isReset(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	if got := sh(t, sb, endConnection); got != "first" {
		t.Errorf("over the source's connection came %q", got)
	}
}

// testNetworkRefuses: a sandbox without an interface has no wire, and interfaces
// that cannot be are refused.
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
