package microvm

import (
	"context"
	"net/netip"
	"os"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
)

// TestForkStaysInItsCell: a vmm with a disk and a network interface is captured
// twice, behind its filter and with its limits. A fork of it has the same limits, and
// a wire in the jail's network.
func TestForkStaysInItsCell(t *testing.T) {
	const diskSize = 96 * mib // more than the RAM
	j := openJail(t)
	e := jailedEngine(t, j.Jail, residentFolder(t))
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	stack := layer.Stack{Size: diskSize}
	s := &sandbox{
		engine: e, vcpus: 2, memory: layer.Stack{Size: 64 * mib}, disks: []disk{{id: "scratch", stack: stack}},
		network: &engine.Network{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500, Address: netip.MustParsePrefix("10.0.2.15/24")},
	}
	top, err := e.top()
	if err != nil {
		t.Fatal(err)
	}
	wire, err := s.wire()
	if err != nil {
		t.Fatal(err)
	}
	m := bareMachine(t)
	m.addDisk(vmmctl.Disk{ID: "scratch", Stack: &stack}, top)
	m.addNet(vmmctl.Net{MAC: s.network.MAC, MTU: 1500}, wire)
	p, err := m.start(j.Jail, engine.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	_, _ = top.Close(), wire.Close() // the vmm has its own
	s.Guest = &Guest{Process: p}
	isLimited(t, p.Pid(), diskSize)
	var last *moment
	for range 2 {
		c, err := s.freeze(t.Context(), &vmmctl.Save{Rebase: true})
		if err != nil {
			t.Fatal(err)
		}
		if last != nil {
			if err := last.release(); err != nil {
				t.Error(err)
			}
		}
		last, err = s.lay(c)
		c.close()
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _, _ = last.release(), s.release() })
	child := &sandbox{engine: e, vcpus: 2, disks: last.disks, network: s.network}
	child.setMemory(last.memory)
	t.Cleanup(func() { _ = child.CloseWire() })
	open := func(ref layer.Ref) (*os.File, error) { return reopen(last.live[ref.Digest].file) }
	from := origin{
		profile: last.profile,
		state:   func() (*os.File, error) { return reopen(last.state) },
		memory:  func(_ context.Context, ref layer.Ref) (*os.File, error) { return open(ref) },
		disk:    func(_ *disk, ref layer.Ref) (*os.File, error) { return open(ref) },
	}
	l, err := e.prepareLoad(child, engine.ForkOptions{}, from)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	fork, err := e.load(t.Context(), child, engine.ForkOptions{}, from, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fork.Kill)
	isLimited(t, fork.Pid(), diskSize)
	for _, sb := range []*sandbox{s, child} {
		wire, err := sb.Wire()
		if err != nil {
			t.Fatal(err)
		}
		_ = wire.Close() // the test only checks that it exists
	}
	// Both processes go on.
	for _, p := range []*process.Process{p, fork} {
		if err := p.Pause(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
