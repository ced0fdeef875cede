package layer

import (
	"fmt"
	"slices"
	"sort"

	"agentrun.dev/internal/storage/extent"
)

const (
	// PageSize is the granule of everything here.
	PageSize = extent.PageSize
	// MaxLayers is how many files an image may consist of.
	MaxLayers = 8
	// MaxExtents bounds an image: each extent of a memory is a mapping, and
	// the time of a fork grows with them.
	MaxExtents = 256
	// MaxRuns is how many extents one new layer may bring. So many runs and
	// zeros fit over any image that was compacted.
	MaxRuns = 64
	// MaxSize bounds images and layers: the largest file that ext4 can hold.
	// Offsets below it add up without overflow.
	MaxSize = 16 << 40
)

// Extent says that the bytes from Start on are those of a layer from Offset on.
type Extent struct {
	Start, Length uint64
	// Layer is an index into Image.Layers.
	Layer  int
	Offset uint64
}

// End is the first byte after the extent.
func (e Extent) End() uint64 { return e.Start + e.Length }

// continues reports whether e goes on where prev ends, in image and layer.
func (e Extent) continues(prev Extent) bool {
	return e.Layer == prev.Layer && e.Start == prev.End() && e.Offset == prev.Offset+prev.Length
}

// Image is the content of a memory or a disk. The extents are sorted and
// disjoint; what none of them covers reads as zeros.
type Image struct {
	Size    uint64
	Layers  []Ref
	Extents []Extent
}

// Validate checks an image that came from a file or another process. The
// other functions rely on what it checks.
func (im Image) Validate() error {
	if im.Size == 0 || im.Size%PageSize != 0 || im.Size > MaxSize {
		return fmt.Errorf("image of %d bytes: must be a multiple of %d, above zero and at most %d", im.Size, PageSize, uint64(MaxSize))
	}
	if len(im.Layers) > MaxLayers {
		return fmt.Errorf("image of %d layers: at most %d are possible", len(im.Layers), MaxLayers)
	}
	if len(im.Extents) > MaxExtents {
		return fmt.Errorf("image of %d extents: at most %d are possible", len(im.Extents), MaxExtents)
	}
	for i, l := range im.Layers {
		if err := l.validate(); err != nil {
			return err
		}
		for _, other := range im.Layers[:i] {
			if other.Digest == l.Digest {
				return fmt.Errorf("layer %s is listed twice", l.Digest)
			}
		}
	}
	return im.validateExtents()
}

func (im Image) validateExtents() error {
	var end uint64
	var used [MaxLayers]bool
	for i, e := range im.Extents {
		if e.Layer < 0 || e.Layer >= len(im.Layers) {
			return fmt.Errorf("extent %d is in layer %d of %d", i, e.Layer, len(im.Layers))
		}
		used[e.Layer] = true
		l := im.Layers[e.Layer]
		switch {
		case e.Start%PageSize != 0 || e.Length%PageSize != 0 || e.Offset%PageSize != 0 || e.Length == 0:
			return fmt.Errorf("extent %d (%#x+%#x at %#x): not in whole pages", i, e.Start, e.Length, e.Offset)
		case e.Start < end:
			return fmt.Errorf("extent %d starts at %#x, before the end %#x of the one before", i, e.Start, end)
		case e.Start > im.Size || e.Length > im.Size-e.Start:
			return fmt.Errorf("extent %d (%#x+%#x): beyond the image's size %#x", i, e.Start, e.Length, im.Size)
		case e.Offset > l.Size || e.Length > l.Size-e.Offset:
			return fmt.Errorf("extent %d (%#x bytes at %#x): beyond the size %#x of layer %s", i, e.Length, e.Offset, l.Size, l.Digest)
		}
		end = e.End()
	}
	for i, l := range im.Layers {
		if !used[i] {
			return fmt.Errorf("layer %s is used by no extent", l.Digest)
		}
	}
	return nil
}

// Find returns the extent that covers off. If there is none, next is where
// the zeros end: the start of the next extent, or the image's size.
func (im Image) Find(off uint64) (e Extent, ok bool, next uint64) {
	i := sort.Search(len(im.Extents), func(i int) bool { return im.Extents[i].End() > off })
	switch {
	case i == len(im.Extents):
		return Extent{}, false, im.Size
	case im.Extents[i].Start > off:
		return Extent{}, false, im.Extents[i].Start
	}
	return im.Extents[i], true, im.Extents[i].End()
}

// Bytes is how much of the image the extents cover.
func (im Image) Bytes() uint64 {
	var n uint64
	for _, e := range im.Extents {
		n += e.Length
	}
	return n
}

// Without is the image without some layers, and the runs that were in them.
func (im Image) Without(drop func(Ref) bool) (rest Image, runs []extent.Run) {
	rest = Image{Size: im.Size, Layers: slices.Clone(im.Layers)}
	for _, e := range im.Extents {
		if drop(im.Layers[e.Layer]) {
			runs = extent.Append(runs, e.Start, e.End())
			continue
		}
		rest.Extents = append(rest.Extents, e)
	}
	rest.tidy()
	return rest, runs
}
