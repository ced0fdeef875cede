package microvm

import (
	"os"
	"testing"

	"agentrun.dev/internal/layer"
	"golang.org/x/sys/unix"
)

// TestHeldFile: a file is found as long as a process has it open or mapped, and
// never another one.
func TestHeldFile(t *testing.T) {
	f, err := memoryFile(chargedName, []byte("content"))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(layer.PageSize); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	held := HeldLayer{Device: st.Dev, Inode: st.Ino}
	find := func(want bool) {
		t.Helper()
		g, err := heldFile(os.Getpid(), held)
		if !want {
			if err == nil {
				t.Error("a file that nobody has was found")
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = g.Close() }()
		b := make([]byte, 7)
		if _, err := g.ReadAt(b, 0); err != nil || string(b) != "content" {
			t.Errorf("it holds %q, %v", b, err)
		}
	}
	find(true) // open
	m, err := unix.Mmap(int(f.Fd()), 0, layer.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	self := &Process{handle: &adopted{id: ProcessID{PID: os.Getpid()}}}
	if !self.mapped()[st.Ino] {
		t.Error("a mapping is not seen")
	}
	find(true) // mapped
	other := held
	other.Device++
	if _, err := heldFile(os.Getpid(), other); err == nil {
		t.Error("a file of another device was taken for it")
	}
	if err := unix.Munmap(m); err != nil {
		t.Fatal(err)
	}
	find(false)
	if self.mapped()[st.Ino] {
		t.Error("a mapping is seen that is gone")
	}
}

// TestCharges: limits are lowered when a file is not mapped any more, once.
func TestCharges(t *testing.T) {
	var c charges
	given := 0
	c.keep(7, func() error { given++; return nil })
	c.keep(8, func() error { given += 10; return nil })
	for _, tt := range []struct {
		mapped map[uint64]bool
		want   int
	}{{map[uint64]bool{7: true, 8: true}, 0}, {map[uint64]bool{7: true}, 10}, {nil, 11}, {nil, 11}} {
		if err := c.settle(tt.mapped); err != nil || given != tt.want {
			t.Errorf("%v: %d were given back, want %d, %v", tt.mapped, given, tt.want, err)
		}
	}
}

// TestAdoptRefuses: a description that does not fit is refused.
func TestAdoptRefuses(t *testing.T) {
	const size = 16 * layer.PageSize
	base, live := layer.Ref{Digest: layer.Digest{1}, Size: size}, layer.Ref{Digest: layer.Digest{2}, Size: size}
	image := func(refs ...layer.Ref) layer.Image {
		im := layer.Image{Size: size, Layers: refs}
		for i := range refs {
			im.Extents = append(im.Extents, layer.Extent{Start: uint64(i) * layer.PageSize, Length: layer.PageSize, Layer: i})
		}
		return im
	}
	for name, tt := range map[string]struct {
		edit func(*LiveImages)
		fits bool
	}{
		"nothing wrong":   {func(*LiveImages) {}, true},
		"memory's size":   {func(l *LiveImages) { l.Memory.Size *= 2 }, false},
		"a disk missing":  {func(l *LiveImages) { l.Disks = nil }, false},
		"a disk's size":   {func(l *LiveImages) { l.Disks[0].Size *= 2 }, false},
		"an unknown one":  {func(l *LiveImages) { l.Held = nil }, false},
		"a broken extent": {func(l *LiveImages) { l.Memory.Extents[0].Length++ }, false},
	} {
		s := &sandbox{memory: image(base), disks: []disk{{id: "scratch", image: image(base)}}}
		l := &LiveImages{Memory: image(base, live), Disks: []layer.Image{image(live)}, Held: []HeldLayer{{Digest: live.Digest}}}
		tt.edit(l)
		err := s.adopt(l)
		if (err == nil) != tt.fits {
			t.Errorf("%s: %v", name, err)
		}
		if fitted := len(s.live) == 1 && len(s.memory.Layers) == 2; fitted != tt.fits {
			t.Errorf("%s: it has %d live layers", name, len(s.live))
		}
	}
}
