package vmm

import (
	"os"
	"testing"

	"agentrun.dev/internal/guestmem"
	"agentrun.dev/internal/kvm"
	"golang.org/x/sys/unix"
)

func openUserfaultfd(t testing.TB) *os.File {
	t.Helper()
	f, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err != nil {
		t.Fatalf("live forks need /dev/userfaultfd: %v", err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func memfd(t testing.TB) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "layer")
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// liveForker captures a bare guest again and again, as one source.
type liveForker struct {
	sys      *kvm.System
	uffd     *os.File
	pagemap  *os.File
	mappings []guestmem.Mapping // of the source's image
}

func newLiveForker(t testing.TB, sys *kvm.System) *liveForker {
	return &liveForker{sys: sys, uffd: openUserfaultfd(t), pagemap: pagemap(t)}
}

// fork captures g; beside is called as soon as the guest goes on, while
// everything is still protected.
func (l *liveForker) fork(t testing.TB, g *testGuest, share bool, beside func()) *frozen {
	t.Helper()
	file := memfd(t)
	c, err := g.NewCapture(guestmem.CaptureConfig{Userfaultfd: l.uffd, Pagemap: l.pagemap, File: file})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	if ok, why := c.Beside(); l.uffd != nil && !ok {
		t.Fatal(why)
	}
	if err := g.Pause(); err != nil {
		t.Fatal(err)
	}
	s, err := g.Save(l.sys)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Begin(); err != nil {
		t.Fatal(err)
	}
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
	if beside != nil {
		beside()
	}
	state, err := s.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	var below []guestmem.Span
	for _, m := range l.mappings {
		below = append(below, m.Span)
	}
	data, _, err := c.List(below)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Copy(data); err != nil {
		t.Fatal(err)
	}
	if share {
		if err := c.Share(); err != nil {
			t.Fatal(err)
		}
		l.mappings = nil
		for _, s := range data {
			l.mappings = append(l.mappings, guestmem.Mapping{Span: s, File: file, Offset: s.Start})
		}
	}
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return &frozen{state: state, layer: file, spans: data, memory: s.Memory, vcpus: len(s.VCPUs), inPlace: true}
}

// TestLiveFork: a child is the source at the instant of the pause, whatever
// the source writes while it is being copied.
func TestLiveFork(t *testing.T) {
	for name, share := range map[string]bool{"shared": true, "apart": false} {
		t.Run(name, func(t *testing.T) {
			sys := openKVM(t)
			source := bootTestGuest(t, 64<<20, 1)
			l := newLiveForker(t, sys)
			source.mustDo(t, 1000, cmdDirty, firstPage, 1000, 1, 7)
			source.mustDo(t, 250, cmdDirty, firstPage+2000, 250, 4, 7)
			for round := range uint32(5) {
				f := l.fork(t, source, share, func() {
					source.mustDo(t, 300, cmdDirty, firstPage, 300, 3, 8+round)      // was dirty
					source.mustDo(t, 200, cmdDirty, firstPage+3500, 200, 2, 8+round) // was not there
				})
				was := 7 + round
				child := f.fork(t, sys)
				child.mustDo(t, 300, cmdCheck, firstPage, 300, 3, was)
				child.mustDo(t, 250, cmdCheck, firstPage+2000, 250, 4, 7)
				if round == 0 {
					child.mustDo(t, 0, cmdCheck, firstPage+3500, 200, 2, 8)
				} else {
					child.mustDo(t, 200, cmdCheck, firstPage+3500, 200, 2, was)
				}
				// Neither sees what the other writes, and the source lost nothing.
				child.mustDo(t, 1000, cmdDirty, firstPage, 1000, 1, 99)
				source.mustDo(t, 300, cmdCheck, firstPage, 300, 3, 8+round)
				source.mustDo(t, 200, cmdCheck, firstPage+3500, 200, 2, 8+round)
				source.mustDo(t, 100, cmdCheck, firstPage+900, 100, 1, 7)
			}
		})
	}
}
