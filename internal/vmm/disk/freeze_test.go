package disk

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/layer/layertest"
	"agentrun.dev/internal/vmm/guestmem"
)

func emptyTop(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "top"))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestIncludeIsSparse: of the runs in include only blocks with content are
// stored, not the zeros between them.
func TestIncludeIsSparse(t *testing.T) {
	const size = 1 << 40
	mem, err := guestmem.NewAnonymous(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mem.Close() }()
	s := layertest.NewStore(t)
	ref := s.Put(func(w *layer.Writer) { _, _ = w.Write(bytes.Repeat([]byte{1}, 3*blockSize)) })
	below := layer.Stack{Size: size, Layers: []layer.Ref{ref}, Extents: []layer.Extent{{Start: size / 2, Length: 3 * blockSize}}}
	d, err := New(below, s.OpenAll(below), emptyTop(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	for _, off := range []int64{8 * blockSize, 9 * blockSize, 100 * blockSize} {
		if n, err := d.WriteAt(mem, []guestmem.Range{{Len: blockSize}}, off); err != nil || n != blockSize {
			t.Fatal(n, err)
		}
	}
	// One block is in a layer, one was written: include lists both, whatever
	// the receiver already has.
	for _, off := range []int64{9 * blockSize, size/2 + blockSize} {
		if err := d.Discard(off, blockSize); err != nil {
			t.Fatal(err)
		}
	}
	top := emptyTop(t)
	if err := d.Prepare(top); err != nil {
		t.Fatal(err)
	}
	f, err := d.Freeze(top)
	if err != nil {
		t.Fatal(err)
	}
	runs, zeros := f.Changed([]extent.Run{{Start: 0, Length: size}})
	wantRuns := []extent.Run{{Start: 8 * blockSize, Length: blockSize}, {Start: 100 * blockSize, Length: blockSize}, {Start: size / 2, Length: blockSize}, {Start: size/2 + 2*blockSize, Length: blockSize}}
	wantZeros := []extent.Run{{Start: 9 * blockSize, Length: blockSize}, {Start: size/2 + blockSize, Length: blockSize}}
	if !slices.Equal(runs, wantRuns) || !slices.Equal(zeros, wantZeros) {
		t.Errorf("%v and zeros %v, not %v and %v", runs, zeros, wantRuns, wantZeros)
	}
}

// TestFreeze: a disk is frozen again and again under random writes, discards
// and copies. A chain of layers, with and without rebasing, yields the content
// of the disk at that instant, and the disk itself loses no data.
func TestFreeze(t *testing.T) {
	const size = 2 << 20
	mem, err := guestmem.NewAnonymous(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mem.Close() }()
	for _, seed := range []uint64{1, 2, 3} {
		r := rand.New(rand.NewPCG(seed, 0))
		s := layertest.NewStore(t)
		content := make([]byte, size)
		stack := layer.Stack{Size: size}
		d, err := New(stack, nil, emptyTop(t))
		if err != nil {
			t.Fatal(err)
		}
		durable := stack // the stack that the disk was made of
		for round := range 30 {
			for range 8 {
				off, n := r.Int64N(size/512)*512, (r.Int64N(40)+1)*512
				n = min(n, size-off)
				if r.IntN(3) == 0 {
					if err := d.Discard(off, n); err != nil {
						t.Fatal(err)
					}
					clear(content[off : off+n])
					continue
				}
				for i := range n {
					content[off+i] = byte(r.Uint32())
				}
				if err := mem.Write(0, content[off:off+n]); err != nil {
					t.Fatal(err)
				}
				if k, err := d.WriteAt(mem, []guestmem.Range{{GPA: 0, Len: uint32(n)}}, off); err != nil || k != n {
					t.Fatal(k, err)
				}
			}
			top := emptyTop(t)
			if err := d.Prepare(top); err != nil {
				t.Fatal(err)
			}
			f, err := d.Freeze(top)
			if err != nil {
				t.Fatal(err)
			}
			if len(d.stages) > 1+maxAside {
				t.Fatalf("%d files in round %d", len(d.stages), round)
			}
			was := bytes.Clone(content)
			// Changes after Freeze are not in the frozen disk.
			if err := d.Discard(0, size/2); err != nil {
				t.Fatal(err)
			}
			clear(content[:size/2])

			rebase := r.IntN(2) == 0
			base, include := stack, []extent.Run(nil)
			if round%5 == 4 { // fold everything into one layer above the durable stack
				base, rebase = durable, true
				for _, e := range stack.Extents {
					include = append(include, extent.Run{Start: e.Start, Length: e.Length})
				}
			}
			runs, zeros := f.Changed(include)
			ref := s.Put(func(w *layer.Writer) {
				if err := f.WriteChanged(w, runs); err != nil {
					t.Fatal(err)
				}
			})
			child, err := layer.Overlay(base, ref, runs, zeros)
			if err != nil {
				t.Fatal(err)
			}
			got := make([]byte, size)
			v, err := layer.OpenStack(child, s.OpenAll(child))
			if err != nil {
				t.Fatal(err)
			}
			if err := v.Read(got, 0); err != nil {
				t.Fatal(err)
			}
			if err := v.Close(); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, was) {
				t.Fatalf("seed %d round %d (rebase %v, include %d): the layers differ from the disk", seed, round, rebase, len(include))
			}
			if rebase {
				f.Rebase()
				stack = child
			}
			if err := d.read(got, 0); err != nil || !bytes.Equal(got, content) {
				t.Fatalf("seed %d round %d: the disk differs (%v)", seed, round, err)
			}
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
