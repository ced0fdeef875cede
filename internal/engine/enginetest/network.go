package enginetest

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guestrpc"
	"golang.org/x/sys/unix"
)

// openConnection leaves a program with a TCP connection to the lan, which sends
// what is written to /run/to and keeps what comes in /run/from.
const openConnection = `
mkfifo /run/to
(exec 3<>/run/to; exec nc 10.0.2.2 7 <&3 >/run/from 2>/dev/null) </dev/null >/dev/null 2>&1 &
echo $! > /run/nc
echo first > /run/to
while ! grep -q first /run/from; do usleep 1000; done`

// lookUp asks the DNS server for a name, which says which lan it is.
func lookUp(name string) string {
	return "nslookup " + name + " | grep -o '10[.]9[.]8[.][0-9]*' | tail -n1"
}

// fails runs a command that must not succeed.
func fails(t *testing.T, sb engine.Sandbox, script string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var out bytes.Buffer
	if st, err := sb.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{"sh", "-c", script}}, nil, &out, &out); err != nil || st.Code == 0 {
		t.Errorf("%s: %+v, %v\n%s", script, st, err, out.Bytes())
	}
}

// testNetwork: a sandbox has the interface that was asked for, its frames go to
// its own wire and to no other, and whoever is there is its network. Forks keep
// its addresses; a fork without a wire reaches nobody.
func (s *suite) testNetwork(t *testing.T) {
	home, wire := newLAN(t, 1)
	spec := s.Spec
	spec.Network, spec.Wire = lanNetwork(), wire
	source, err := s.Engine.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	configured(t, source)
	reaches(t, source, home, "source", "10.9.8.1")
	// Large ones, and one that has to be cut in two.
	sh(t, source, "ping -c 2 -s 1372 -W 30 10.0.2.2 && head -c 300000 /dev/urandom > /blob && nc 10.0.2.2 7 < /blob | cmp - /blob")
	sh(t, source, openConnection)

	snap, err := source.Snapshot(t.Context(), filepath.Join(s.dir, "wired"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	away, wire := newLAN(t, 2)
	fork := s.fork(t, snap, engine.ForkOptions{Wire: wire})
	configured(t, fork)
	reaches(t, fork, away, "fork", "10.9.8.2")
	isReset(t, fork)

	live, wire := newLAN(t, 3)
	children, _ := liveFork(t, source, engine.ForkOptions{Wire: wire}, engine.ForkOptions{})
	configured(t, children[0])
	reaches(t, children[0], live, "child", "10.9.8.3")
	isReset(t, children[0])
	// A fork of a fork.
	farther, wire := newLAN(t, 4)
	grandchildren, _ := liveFork(t, fork, engine.ForkOptions{Wire: wire})
	reaches(t, grandchildren[0], farther, "grandchild", "10.9.8.4")

	// Nobody is at the other end.
	for _, sb := range []engine.Sandbox{children[1], s.fork(t, snap, engine.ForkOptions{})} {
		configured(t, sb)
		fails(t, sb, "timeout 1 "+lookUp("nobody.test")+" | grep .")
		fails(t, sb, "nc -w 1 10.0.2.2 7 </dev/null")
		fails(t, sb, "ping -c 1 -W 1 10.0.2.2")
	}

	// All the time, the source had its own, and its connection goes on.
	sh(t, source, "echo second > /run/to; while ! grep -q second /run/from; do usleep 1000; done")
	reaches(t, source, home, "again", "10.9.8.1")
	for _, l := range []struct {
		*lan
		names []string
	}{{home, []string{"source.test", "again.test"}}, {away, []string{"fork.test"}}, {live, []string{"child.test"}}, {farther, []string{"grandchild.test"}}} {
		if got := slices.Compact(l.asked()); !slices.Equal(got, l.names) {
			t.Errorf("%v: names %q arrived, not %q", l.answer, got, l.names)
		}
	}
	if got := home.dialed(); len(got) != 4 {
		t.Errorf("connections from the source: %q", got)
	}
}

// configured checks what programs see.
func configured(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	n := lanNetwork()
	got := sh(t, sb, "ip addr show dev eth0; ip route; cat /etc/resolv.conf; grep : /proc/net/dev | cut -d: -f1 | tr -d ' ' | sort | tr '\\n' ' '")
	for _, want := range []string{"02:00:00:00:00:0f", "mtu 1400", n.Address.String(), "default via 10.0.2.2 dev eth0", "10.0.2.0/24 dev eth0", "nameserver 10.0.2.3", "eth0 lo"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in what programs see:\n%s", want, got)
		}
	}
}

// reaches checks that a name is answered by this lan, and a connection taken.
func reaches(t *testing.T, sb engine.Sandbox, l *lan, name, answer string) {
	t.Helper()
	if got := sh(t, sb, lookUp(name+".test")); got != answer {
		t.Errorf("%s.test is %q, not %s", name, got, answer)
	}
	// By the gateway.
	if got := sh(t, sb, "echo hello from "+name+" | nc -w 30 192.0.2.7 7"); got != "hello from "+name {
		t.Errorf("the connection of %s returned %q", name, got)
	}
	if got := l.dialed(); !slices.Contains(got, "192.0.2.7:7") {
		t.Errorf("connections from %s: %q", name, got)
	}
}

// isReset checks that the connection which the source had open when it was forked
// is none in the fork.
func isReset(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	// Opened so, the queue takes it even if its reader has gone already.
	if got := sh(t, sb, "exec 3<>/run/to; echo mine >&3; while kill -0 $(cat /run/nc) 2>/dev/null; do usleep 1000; done; cat /run/from"); got != "first" {
		t.Errorf("over the source's connection came %q", got)
	}
}

// testNetworkRefuses: what is no wire, or belongs to no interface, is refused.
func (s *suite) testNetworkRefuses(t *testing.T) {
	_, wire := newLAN(t, 1)
	if sb, err := s.Engine.Fork(t.Context(), s.warm, engine.ForkOptions{Wire: wire}); err == nil || !strings.Contains(err.Error(), "no network interface") {
		t.Errorf("a wire for a sandbox without an interface: %v", err)
		if err == nil {
			_ = sb.Close()
		}
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	other, end := os.NewFile(uintptr(fds[0]), "other"), os.NewFile(uintptr(fds[1]), "end")
	defer func() { _, _ = other.Close(), end.Close() }()
	for name, change := range map[string]func(*engine.Spec){
		"no wire at all": func(spec *engine.Spec) { spec.Wire = spec.Root },
		"another socket": func(spec *engine.Spec) { spec.Wire = other },
		"no interface":   func(spec *engine.Spec) { spec.Network = nil },
		"many devices":   func(spec *engine.Spec) { spec.Network.MAC[0] = 3 },
		"no address":     func(spec *engine.Spec) { spec.Network.Address = netip.Prefix{} },
		"no frames":      func(spec *engine.Spec) { spec.Network.MTU = 0 },
		"far gateway":    func(spec *engine.Spec) { spec.Network.Gateway = netip.AddrFrom4([4]byte{192, 0, 2, 1}) },
	} {
		spec := s.Spec
		spec.Network, spec.Wire = lanNetwork(), wire
		change(&spec)
		if sb, err := s.Engine.Boot(t.Context(), spec); err == nil {
			t.Errorf("%s: it was booted", name)
			_ = sb.Close()
		}
	}
}
