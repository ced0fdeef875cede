package vmmctl

import (
	"math"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/livefork"
)

const page = layer.PageSize

func saved() *Saved {
	return &Saved{
		Memory: Change{Runs: []extent.Run{{Start: page, Length: 2 * page}}, Zeros: []extent.Run{{Start: 8 * page, Length: page}}},
		Disks:  []Change{{Runs: []extent.Run{{Start: 0, Length: page}}}, {}},
		Stats:  livefork.Stats{Pause: 1e6, Waits: 3, MedianWait: 1e3, P99Wait: 2e3, LongestWait: 3e3, Copied: 2 * page, WhyCopiedInPause: "why"},
	}
}

// TestCheckSaved: false data of a vmm is noticed. Package layer tests the check
// of the lists.
func TestCheckSaved(t *testing.T) {
	memory, disks := uint64(64*page), []uint64{4 * page, page}
	for name, lie := range map[string]func(*Saved){
		"memory beyond":    func(s *Saved) { s.Memory.Runs[0].Length = 64 * page },
		"zeros beyond":     func(s *Saved) { s.Memory.Zeros[0].Start = 64 * page },
		"disk beyond":      func(s *Saved) { s.Disks[0].Runs[0].Length = 5 * page },
		"other disk":       func(s *Saved) { s.Disks[1].Zeros = []extent.Run{{Start: page, Length: page}} },
		"a disk less":      func(s *Saved) { s.Disks = s.Disks[:1] },
		"a disk more":      func(s *Saved) { s.Disks = append(s.Disks, Change{}) },
		"negative pause":   func(s *Saved) { s.Pause = math.MinInt64 },
		"longest pause":    func(s *Saved) { s.Pause = math.MaxInt64 },
		"negative median":  func(s *Saved) { s.MedianWait = -1 },
		"negative of 99":   func(s *Saved) { s.P99Wait = -1 },
		"negative longest": func(s *Saved) { s.LongestWait = -1 },
		"copied":           func(s *Saved) { s.Copied = 129 * page },
	} {
		s := saved()
		lie(s)
		s, err := UnmarshalSaved(s.Marshal())
		if err != nil {
			t.Fatal(name, err)
		}
		if s.Check(memory, disks) == nil {
			t.Errorf("%s: believed", name)
		}
	}
	if err := saved().Check(memory, disks); err != nil {
		t.Error(err)
	}
}

func TestCheckTouched(t *testing.T) {
	good := Touched{Written: []extent.Run{{Start: page, Length: page}}, Read: []extent.Run{{Start: 0, Length: page}}}
	if err := good.Check(2 * page); err != nil {
		t.Error(err)
	}
	if good.Check(page) == nil {
		t.Error("pages beyond the memory")
	}
	good.Read = []extent.Run{{Start: page, Length: page}, {Start: 0, Length: page}}
	if good.Check(2*page) == nil {
		t.Error("pages that are not sorted")
	}
	// No valid message holds more than MaxTouched.
	many := Touched{}
	for i := range uint64(MaxTouched + 1) {
		many.Written = append(many.Written, extent.Run{Start: 2 * i * page, Length: page})
	}
	if many.Check(layer.MaxSize) == nil {
		t.Error("too many pages")
	}
}

// FuzzSaved: data that decodes and passes the check fulfils all that the parent
// relies on.
func FuzzSaved(f *testing.F) {
	f.Add(saved().Marshal())
	f.Add((&Saved{}).Marshal())
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := UnmarshalSaved(b)
		if err != nil || s.Check(64*page, []uint64{4 * page, page}) != nil {
			return
		}
		for i, c := range append([]Change{s.Memory}, s.Disks...) {
			size := []uint64{64 * page, 4 * page, page}[i]
			var seen [64]bool
			for _, r := range append(c.Runs[:len(c.Runs):len(c.Runs)], c.Zeros...) {
				if r.Length == 0 || r.Start%page != 0 || r.Length%page != 0 {
					t.Fatalf("%+v", r)
				}
				for p := r.Start / page; p < (r.Start+r.Length)/page; p++ {
					if p*page >= size || seen[p] {
						t.Fatalf("page %d of %d bytes is told of twice, or is not there", p, size)
					}
					seen[p] = true
				}
			}
			if extent.Total(c.Runs) > size {
				t.Fatal("runs hold more than there is")
			}
		}
	})
}

// FuzzTouched does the same for pages.
func FuzzTouched(f *testing.F) {
	f.Add(Touched{Written: []extent.Run{{Start: page, Length: page}}, Read: []extent.Run{{Start: 0, Length: page}}}.Marshal())
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := UnmarshalTouched(b)
		if err != nil || p.Check(64*page) != nil {
			return
		}
		for _, list := range [][]extent.Run{p.Written, p.Read} {
			if extent.Total(list) > 64*page {
				t.Fatal("more pages than there are")
			}
		}
	})
}
