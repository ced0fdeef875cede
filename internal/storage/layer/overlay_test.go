package layer_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/layer/layertest"
)

func TestGather(t *testing.T) {
	const p = layer.PageSize
	far := extent.Run{Start: 1 << 30, Length: p}
	many := func(n int, gap uint64) (runs []extent.Run) {
		for i := range uint64(n) {
			runs = append(runs, extent.Run{Start: i * (p + gap), Length: p})
		}
		return runs
	}
	for _, c := range []struct {
		name string
		in   []extent.Run
		want int
	}{
		{"nothing", nil, 0},
		{"small gaps", append(many(10, layer.GatheredGap), far), 2},
		{"large gaps", append(many(10, layer.GatheredGap+p), far), 11},
		// 16 gaps of 64 KiB are 1 MiB; a sixteenth of the joined runs may be
		// added.
		{"as long as it costs little", many(40, layer.GatheredGap), 40 - layer.GatheredBytes/layer.GatheredGap},
		{"what is large may grow more", append(many(40, layer.GatheredGap), extent.Run{Start: 1 << 30, Length: 1 << 30}), 2},
		{"not more than fit", many(500, layer.GatheredGap), layer.MaxRuns},
		{"too many large gaps", many(layer.MaxRuns+1, layer.GatheredGap+p), layer.MaxRuns},
	} {
		before := slices.Clone(c.in)
		got := layer.Gather(c.in)
		if len(got) != c.want {
			t.Errorf("%s: %d runs, want %d", c.name, len(got), c.want)
		}
		if !slices.Equal(c.in, before) {
			t.Errorf("%s: the argument was changed", c.name)
		}
		for _, r := range c.in {
			if !slices.ContainsFunc(got, func(g extent.Run) bool { return g.Start <= r.Start && r.End() <= g.End() }) {
				t.Errorf("%s: run %#x was lost", c.name, r.Start)
			}
		}
	}
}

// randomRuns makes sorted and disjoint runs, some of them adjacent.
func randomRuns(r *rand.Rand, pages uint64, most int) []extent.Run {
	var runs []extent.Run
	var at uint64
	for range r.IntN(most + 1) {
		at += uint64(r.IntN(int(2*pages/uint64(most)) + 1))
		n := uint64(1 + r.IntN(3))
		if at+n > pages {
			break
		}
		runs = append(runs, extent.Run{Start: at * layer.PageSize, Length: n * layer.PageSize})
		at += n
	}
	return runs
}

// packed writes the model's content of runs as a layer.
func packed(s layertest.Store, model []byte, runs []extent.Run) layer.Ref {
	return s.Put(func(w *layer.Writer) {
		for _, r := range runs {
			if _, err := w.Write(model[r.Start:r.End()]); err != nil {
				s.Fatal(err)
			}
		}
	})
}

// page is filled with one byte that is not zero.
func page(r *rand.Rand) []byte {
	return bytes.Repeat([]byte{byte(1 + r.IntN(255))}, layer.PageSize)
}

// TestGenerations changes a stack repeatedly, as forks of forks do, and
// compares it and its ancestors with byte slices.
func TestGenerations(t *testing.T) {
	limits := 0
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 2))
		s := layertest.NewStore(t)
		pages := uint64(100 + r.IntN(400))
		stack := layer.Stack{Size: pages * layer.PageSize}
		model := make([]byte, stack.Size)
		var ancestors []layer.Stack
		var contents [][]byte
		for range 25 {
			ancestors, contents = append(ancestors, stack), append(contents, slices.Clone(model))
			runs := extent.Coalesce(randomRuns(r, pages, 100), layer.MaxRuns)
			zeros := randomRuns(r, pages, layer.MaxRuns)
			for _, z := range zeros {
				clear(model[z.Start:z.End()])
			}
			for _, run := range runs {
				for at := run.Start; at < run.End(); at += layer.PageSize {
					if r.IntN(4) > 0 {
						copy(model[at:], page(r))
					} else {
						clear(model[at : at+layer.PageSize])
					}
				}
			}
			stack = grow(t, s, stack, model, runs, zeros, &limits)
			if err := stack.Validate(); err != nil {
				t.Fatal(err)
			}
			layertest.SameBytes(t, "stack", s.Content(stack), model)
		}
		for i, a := range ancestors {
			layertest.SameBytes(t, "ancestor", s.Content(a), contents[i])
		}
	}
	if limits == 0 {
		t.Error("no stack reached a limit")
	}
}

// grow overlays, after a compaction if that is needed. One compaction is always
// enough.
func grow(t *testing.T, s layertest.Store, stack layer.Stack, model []byte, runs, zeros []extent.Run, limits *int) layer.Stack {
	t.Helper()
	top := packed(s, model, runs)
	out, err := layer.Overlay(stack, top, runs, zeros)
	if !errors.Is(err, layer.ErrNeedsCompaction) {
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	*limits++
	before := s.Content(stack)
	var small layer.Stack
	s.Put(func(w *layer.Writer) {
		small, err = layer.Compact(t.Context(), stack, s.Open, w)
		if err != nil {
			t.Fatal(err)
		}
	})
	if err := small.Validate(); err != nil || len(small.Layers) > 1 || len(small.Extents) > layer.MaxRuns {
		t.Fatalf("compacted: %d layers, %d extents, %v", len(small.Layers), len(small.Extents), err)
	}
	layertest.SameBytes(t, "compacted", s.Content(small), before)
	if out, err = layer.Overlay(small, top, runs, zeros); err != nil {
		t.Fatalf("overlay of a compacted stack: %v", err)
	}
	return out
}

func TestOverlayTidies(t *testing.T) {
	const p = layer.PageSize
	base := layer.Stack{8 * p, []layer.Ref{layertest.Ref(1, 4), layertest.Ref(2, 2)}, []layer.Extent{ext(0, 4, 0, 0), ext(5, 2, 1, 0)}}
	for _, c := range []struct {
		name  string
		top   layer.Ref
		runs  []extent.Run
		zeros []extent.Run
		want  layer.Stack
	}{
		{"nothing", layer.Ref{}, nil, nil, base},
		{"zeros split", layer.Ref{}, nil, []extent.Run{{Start: p, Length: p}},
			layer.Stack{8 * p, base.Layers, []layer.Extent{ext(0, 1, 0, 0), ext(2, 2, 0, 2), ext(5, 2, 1, 0)}}},
		{"zeros of all", layer.Ref{}, nil, []extent.Run{{Start: 0, Length: 8 * p}}, layer.Stack{Size: 8 * p}},
		{"zeros over two extents", layer.Ref{}, nil, []extent.Run{{Start: 3 * p, Length: 3 * p}},
			layer.Stack{8 * p, base.Layers, []layer.Extent{ext(0, 3, 0, 0), ext(6, 1, 1, 1)}}},
		{"a layer falls away", layertest.Ref(3, 5), []extent.Run{{Start: 0, Length: 5 * p}}, nil,
			layer.Stack{8 * p, []layer.Ref{layertest.Ref(2, 2), layertest.Ref(3, 5)}, []layer.Extent{ext(0, 5, 1, 0), ext(5, 2, 0, 0)}}},
		{"adjacent runs are one extent", layertest.Ref(3, 2), []extent.Run{{Start: p, Length: p}, {Start: 2 * p, Length: p}}, nil,
			layer.Stack{8 * p, []layer.Ref{layertest.Ref(1, 4), layertest.Ref(2, 2), layertest.Ref(3, 2)}, []layer.Extent{ext(0, 1, 0, 0), ext(1, 2, 2, 0), ext(3, 1, 0, 3), ext(5, 2, 1, 0)}}},
		{"a run wins over zeros", layertest.Ref(3, 1), []extent.Run{{Start: p, Length: p}}, []extent.Run{{Start: 0, Length: 4 * p}},
			layer.Stack{8 * p, []layer.Ref{layertest.Ref(2, 2), layertest.Ref(3, 1)}, []layer.Extent{ext(1, 1, 1, 0), ext(5, 2, 0, 0)}}},
		{"a layer that is there already", layertest.Ref(2, 2), []extent.Run{{Start: 0, Length: p}, {Start: 7 * p, Length: p}}, nil,
			layer.Stack{8 * p, base.Layers, []layer.Extent{ext(0, 1, 1, 0), ext(1, 3, 0, 1), ext(5, 2, 1, 0), ext(7, 1, 1, 1)}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := layer.Overlay(base, c.top, c.runs, c.zeros)
			if err != nil {
				t.Fatal(err)
			}
			if got.Size != c.want.Size || !slices.Equal(got.Layers, c.want.Layers) || !slices.Equal(got.Extents, c.want.Extents) {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

func TestOverlayRefuses(t *testing.T) {
	const p = layer.PageSize
	base := layer.Stack{8 * p, []layer.Ref{layertest.Ref(1, 4)}, []layer.Extent{ext(0, 4, 0, 0)}}
	crowd := make([]extent.Run, layer.MaxRuns+1)
	for i := range crowd {
		crowd[i] = extent.Run{Start: uint64(2*i) * p, Length: p}
	}
	for _, c := range []struct {
		name  string
		base  layer.Stack
		top   layer.Ref
		runs  []extent.Run
		zeros []extent.Run
		say   string
	}{
		{"a bad base", layer.Stack{Size: 1}, layer.Ref{}, nil, nil, "stack of 1 bytes"},
		{"unsorted runs", base, layertest.Ref(2, 2), []extent.Run{{Start: p, Length: p}, {Start: 0, Length: p}}, nil, "runs: run 1 starts at"},
		{"runs beyond", base, layertest.Ref(2, 2), []extent.Run{{Start: 7 * p, Length: 2 * p}}, nil, "beyond the size"},
		{"odd zeros", base, layer.Ref{}, nil, []extent.Run{{Start: 1, Length: p}}, "zeros: run 0"},
		{"too many runs", layer.Stack{Size: 1 << 30}, layertest.Ref(2, layer.MaxRuns+1), crowd, nil, "coalesce"},
		{"a bad layer", base, layertest.Ref(2, 0), []extent.Run{{Start: 0, Length: p}}, nil, "of 0 bytes"},
		{"a layer too long", base, layertest.Ref(2, 3), []extent.Run{{Start: 0, Length: p}}, nil, "its runs have 4096"},
		{"a known layer of another size", base, layertest.Ref(1, 1), []extent.Run{{Start: 5 * p, Length: p}}, nil, "in the stack below"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := layer.Overlay(c.base, c.top, c.runs, c.zeros)
			layertest.WantError(t, err, c.say)
			if errors.Is(err, layer.ErrNeedsCompaction) {
				t.Error("compaction would not help")
			}
		})
	}
}

func TestCompactZeros(t *testing.T) {
	s := layertest.NewStore(t)
	zero := s.Bytes(make([]byte, 4*layer.PageSize))
	stack := layer.Stack{8 * layer.PageSize, []layer.Ref{zero}, []layer.Extent{ext(2, 4, 0, 0)}}
	var out bytes.Buffer
	got, err := layer.Compact(t.Context(), stack, s.Open, &out)
	if err != nil || len(got.Layers) != 0 || got.Size != stack.Size || out.Len() != 0 {
		t.Errorf("%+v, %d bytes, %v", got, out.Len(), err)
	}
}

func TestCompactFails(t *testing.T) {
	s := layertest.NewStore(t)
	l := s.Bytes(bytes.Repeat([]byte{7}, 4*layer.PageSize))
	stack := layer.Stack{8 * layer.PageSize, []layer.Ref{l}, []layer.Extent{ext(2, 4, 0, 0)}}
	if _, err := layer.Compact(t.Context(), layer.Stack{}, s.Open, io.Discard); err == nil {
		t.Error("an empty stack was compacted")
	}
	_, err := layer.Compact(t.Context(), stack, func(layer.Ref) (*os.File, error) { return nil, os.ErrNotExist }, io.Discard)
	layertest.WantError(t, err, "open layer "+l.Digest.String())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := layer.Compact(ctx, stack, s.Open, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	_, err = layer.Compact(t.Context(), stack, s.Open, full)
	layertest.WantError(t, err, "write layer", "no space")
	// A layer that was truncated, before or after it was opened.
	b, err := layer.OpenStack(stack, s.OpenAll(stack))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := os.Truncate(s.Path(l), layer.PageSize); err != nil {
		t.Fatal(err)
	}
	layertest.WantError(t, b.Read(make([]byte, stack.Size), 0), "read layer "+l.Digest.String(), "unexpected EOF")
	_, err = layer.Compact(t.Context(), stack, s.Open, io.Discard)
	layertest.WantError(t, err, "has 4096 bytes", "says 16384")
}
