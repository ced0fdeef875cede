package layer

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
)

func TestGather(t *testing.T) {
	const p = PageSize
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
		{"small gaps", append(many(10, gatheredGap), far), 2},
		{"large gaps", append(many(10, gatheredGap+p), far), 11},
		// 16 gaps of 64 KiB are 1 MiB; of what they join a sixteenth may be added.
		{"as long as it costs little", many(40, gatheredGap), 40 - gatheredBytes/gatheredGap},
		{"what is large may grow more", append(many(40, gatheredGap), extent.Run{Start: 1 << 30, Length: 1 << 30}), 2},
		{"not more than fit", many(500, gatheredGap), MaxRuns},
		{"too many large gaps", many(MaxRuns+1, gatheredGap+p), MaxRuns},
	} {
		before := slices.Clone(c.in)
		got := Gather(c.in)
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

// randomRuns are sorted and disjoint, sometimes adjacent.
func randomRuns(r *rand.Rand, pages uint64, most int) []extent.Run {
	var runs []extent.Run
	var at uint64
	for range r.IntN(most + 1) {
		at += uint64(r.IntN(int(2*pages/uint64(most)) + 1))
		n := uint64(1 + r.IntN(3))
		if at+n > pages {
			break
		}
		runs = append(runs, extent.Run{Start: at * PageSize, Length: n * PageSize})
		at += n
	}
	return runs
}

// packed writes the model's content of runs as a layer.
func packed(s store, model []byte, runs []extent.Run) Ref {
	return s.put(func(w *Writer) {
		for _, r := range runs {
			if _, err := w.Write(model[r.Start:r.End()]); err != nil {
				s.t.Fatal(err)
			}
		}
	})
}

// TestGenerations changes an image again and again, as forks of forks do, and
// compares it and its ancestors with byte slices.
func TestGenerations(t *testing.T) {
	limits := 0
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 2))
		s := newStore(t)
		pages := uint64(100 + r.IntN(400))
		im := Image{Size: pages * PageSize}
		model := make([]byte, im.Size)
		var ancestors []Image
		var contents [][]byte
		for range 25 {
			ancestors, contents = append(ancestors, im), append(contents, slices.Clone(model))
			runs := extent.Coalesce(randomRuns(r, pages, 100), MaxRuns)
			zeros := randomRuns(r, pages, MaxRuns)
			for _, z := range zeros {
				clear(model[z.Start:z.End()])
			}
			for _, run := range runs {
				for at := run.Start; at < run.End(); at += PageSize {
					if r.IntN(4) > 0 {
						copy(model[at:], page(r))
					} else {
						clear(model[at : at+PageSize])
					}
				}
			}
			im = grow(t, s, im, model, runs, zeros, &limits)
			if err := im.Validate(); err != nil {
				t.Fatal(err)
			}
			sameBytes(t, "image", s.content(im), model)
		}
		for i, a := range ancestors {
			sameBytes(t, "ancestor", s.content(a), contents[i])
		}
	}
	if limits == 0 {
		t.Error("no image reached a limit")
	}
}

// grow overlays, after a compaction if that is needed. One is always enough.
func grow(t *testing.T, s store, im Image, model []byte, runs, zeros []extent.Run, limits *int) Image {
	t.Helper()
	top := packed(s, model, runs)
	out, err := Overlay(im, top, runs, zeros)
	if !errors.Is(err, ErrNeedsCompaction) {
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	*limits++
	before := s.content(im)
	var small Image
	s.put(func(w *Writer) {
		small, err = Compact(t.Context(), im, s.open, w)
		if err != nil {
			t.Fatal(err)
		}
	})
	if err := small.Validate(); err != nil || len(small.Layers) > 1 || len(small.Extents) > MaxRuns {
		t.Fatalf("compacted: %d layers, %d extents, %v", len(small.Layers), len(small.Extents), err)
	}
	sameBytes(t, "compacted", s.content(small), before)
	if out, err = Overlay(small, top, runs, zeros); err != nil {
		t.Fatalf("overlay of a compacted image: %v", err)
	}
	return out
}

func TestOverlayTidies(t *testing.T) {
	const p = PageSize
	base := Image{8 * p, []Ref{ref(1, 4), ref(2, 2)}, []Extent{ext(0, 4, 0, 0), ext(5, 2, 1, 0)}}
	for _, c := range []struct {
		name  string
		top   Ref
		runs  []extent.Run
		zeros []extent.Run
		want  Image
	}{
		{"nothing", Ref{}, nil, nil, base},
		{"zeros split", Ref{}, nil, []extent.Run{{Start: p, Length: p}},
			Image{8 * p, base.Layers, []Extent{ext(0, 1, 0, 0), ext(2, 2, 0, 2), ext(5, 2, 1, 0)}}},
		{"zeros of all", Ref{}, nil, []extent.Run{{Start: 0, Length: 8 * p}}, Image{Size: 8 * p}},
		{"zeros over two extents", Ref{}, nil, []extent.Run{{Start: 3 * p, Length: 3 * p}},
			Image{8 * p, base.Layers, []Extent{ext(0, 3, 0, 0), ext(6, 1, 1, 1)}}},
		{"a layer falls away", ref(3, 5), []extent.Run{{Start: 0, Length: 5 * p}}, nil,
			Image{8 * p, []Ref{ref(2, 2), ref(3, 5)}, []Extent{ext(0, 5, 1, 0), ext(5, 2, 0, 0)}}},
		{"adjacent runs are one extent", ref(3, 2), []extent.Run{{Start: p, Length: p}, {Start: 2 * p, Length: p}}, nil,
			Image{8 * p, []Ref{ref(1, 4), ref(2, 2), ref(3, 2)}, []Extent{ext(0, 1, 0, 0), ext(1, 2, 2, 0), ext(3, 1, 0, 3), ext(5, 2, 1, 0)}}},
		{"a run wins over zeros", ref(3, 1), []extent.Run{{Start: p, Length: p}}, []extent.Run{{Start: 0, Length: 4 * p}},
			Image{8 * p, []Ref{ref(2, 2), ref(3, 1)}, []Extent{ext(1, 1, 1, 0), ext(5, 2, 0, 0)}}},
		{"a layer that is there already", ref(2, 2), []extent.Run{{Start: 0, Length: p}, {Start: 7 * p, Length: p}}, nil,
			Image{8 * p, base.Layers, []Extent{ext(0, 1, 1, 0), ext(1, 3, 0, 1), ext(5, 2, 1, 0), ext(7, 1, 1, 1)}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Overlay(base, c.top, c.runs, c.zeros)
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
	const p = PageSize
	base := Image{8 * p, []Ref{ref(1, 4)}, []Extent{ext(0, 4, 0, 0)}}
	crowd := make([]extent.Run, MaxRuns+1)
	for i := range crowd {
		crowd[i] = extent.Run{Start: uint64(2*i) * p, Length: p}
	}
	for _, c := range []struct {
		name  string
		base  Image
		top   Ref
		runs  []extent.Run
		zeros []extent.Run
		say   string
	}{
		{"a bad base", Image{Size: 1}, Ref{}, nil, nil, "image of 1 bytes"},
		{"unsorted runs", base, ref(2, 2), []extent.Run{{Start: p, Length: p}, {Start: 0, Length: p}}, nil, "runs: run 1 starts at"},
		{"runs beyond", base, ref(2, 2), []extent.Run{{Start: 7 * p, Length: 2 * p}}, nil, "beyond the size"},
		{"odd zeros", base, Ref{}, nil, []extent.Run{{Start: 1, Length: p}}, "zeros: run 0"},
		{"too many runs", Image{Size: 1 << 30}, ref(2, MaxRuns+1), crowd, nil, "coalesce"},
		{"a bad layer", base, ref(2, 0), []extent.Run{{Start: 0, Length: p}}, nil, "of 0 bytes"},
		{"a layer too long", base, ref(2, 3), []extent.Run{{Start: 0, Length: p}}, nil, "its runs have 4096"},
		{"a known layer of another size", base, ref(1, 1), []extent.Run{{Start: 5 * p, Length: p}}, nil, "in the image below"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Overlay(c.base, c.top, c.runs, c.zeros)
			wantError(t, err, c.say)
			if errors.Is(err, ErrNeedsCompaction) {
				t.Error("compaction would not help")
			}
		})
	}
}

func TestCompactZeros(t *testing.T) {
	s := newStore(t)
	zero := s.bytes(make([]byte, 4*PageSize))
	im := Image{8 * PageSize, []Ref{zero}, []Extent{ext(2, 4, 0, 0)}}
	var out bytes.Buffer
	got, err := Compact(t.Context(), im, s.open, &out)
	if err != nil || len(got.Layers) != 0 || got.Size != im.Size || out.Len() != 0 {
		t.Errorf("%+v, %d bytes, %v", got, out.Len(), err)
	}
}

func TestCompactFails(t *testing.T) {
	s := newStore(t)
	l := s.bytes(bytes.Repeat([]byte{7}, 4*PageSize))
	im := Image{8 * PageSize, []Ref{l}, []Extent{ext(2, 4, 0, 0)}}
	if _, err := Compact(t.Context(), Image{}, s.open, io.Discard); err == nil {
		t.Error("an empty image was compacted")
	}
	_, err := Compact(t.Context(), im, func(Ref) (*os.File, error) { return nil, os.ErrNotExist }, io.Discard)
	wantError(t, err, "open layer "+l.Digest.String())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Compact(ctx, im, s.open, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	_, err = Compact(t.Context(), im, s.open, full)
	wantError(t, err, "write layer", "no space")
	// A layer that lost its end, before or after it was opened.
	b, err := OpenImage(im, s.openAll(im))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := os.Truncate(s.path(l), PageSize); err != nil {
		t.Fatal(err)
	}
	wantError(t, b.Read(make([]byte, im.Size), 0), "read layer "+l.Digest.String(), "unexpected EOF")
	_, err = Compact(t.Context(), im, s.open, io.Discard)
	wantError(t, err, "has 4096 bytes", "says 16384")
}
