package disk

import (
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
)

// Frozen is a disk as of the call of Freeze. It can be read while the disk is
// in use, until the next call of Prepare.
type Frozen struct {
	view
	disk *Disk
	// since holds the blocks written after the stack to which Changed compares.
	since bitmap
}

// maxAside is how many files a disk puts aside; Prepare merges a further one.
const maxAside = 2

// Prepare makes a file ready to become the disk's next top. It also makes room
// for the current top among the files put aside, by merging two of them if
// there are maxAside. The disk may be in use, but its earlier Frozen must not
// be used any more.
func (d *Disk) Prepare(top *os.File) error {
	if d.ReadOnly() {
		return errReadOnly
	}
	if err := prepareTop(top, d.below.Stack.Size); err != nil {
		return fmt.Errorf("prepare top %s: %w", top.Name(), err)
	}
	if len(d.stages)-1 < maxAside {
		return nil
	}
	// No read reaches the blocks that are overwritten here: upper hides them.
	upper, lower := d.stages[1], d.stages[2]
	v := view{d.below, []*stage{upper}}
	data, holes := v.content(&upper.present)
	err := layer.EachChunk(data, v.read, func(p []byte, off uint64) error {
		_, err := lower.file.WriteAt(p, int64(off))
		return err
	})
	for _, h := range holes {
		if err == nil {
			err = d.clear(lower, h.Start, h.End())
		}
	}
	if err != nil {
		return fmt.Errorf("merge what a disk has written: %w", err)
	}
	d.merged = true
	return nil
}

// Freeze puts the top aside and replaces it by a prepared file, which then
// belongs to the disk. The disk must not be in use meanwhile.
func (d *Disk) Freeze(top *os.File) (*Frozen, error) {
	if d.ReadOnly() {
		return nil, errReadOnly
	}
	var err error
	if d.merged {
		d.merged = false
		upper, lower := d.stages[1], d.stages[2]
		lower.present.add(&upper.present)
		d.stages = append([]*stage{d.stages[0]}, d.stages[2:]...)
		err = upper.file.Close()
	}
	old := d.stages[0]
	d.since.add(&old.present)
	d.stages = append([]*stage{newStage(top, d.below.Stack.Size)}, d.stages...)
	f := &Frozen{view: view{d.below, d.stages[1:]}, disk: d, since: newBitmap(d.below.Stack.Size / blockSize)}
	f.since.add(&d.since)
	return f, err
}

// Changed is Disk.Changed as of the call of Freeze. It lists the blocks written
// since the last Rebase, and the content of include.
func (f *Frozen) Changed(include []extent.Run) (runs, zeros []extent.Run) {
	return f.changed(&f.since, include)
}

// WriteChanged writes the content of runs, one after the other.
func (f *Frozen) WriteChanged(w io.Writer, runs []extent.Run) error { return f.writeRuns(w, runs) }

// Rebase declares that the content that Changed listed is stored elsewhere, so
// the next Changed does not list it again. The disk must not be frozen
// meanwhile.
func (f *Frozen) Rebase() {
	// Blocks written after Freeze are in the top and not yet in since.
	f.disk.since = newBitmap(f.below.Stack.Size / blockSize)
}

// clear replaces a range of a stage by zeros.
func (d *Disk) clear(s *stage, off, end uint64) error {
	err := punchHole(s.fd, off, end)
	if errors.Is(err, errors.ErrUnsupported) {
		return writeZeros(s.file, off, end)
	}
	return err
}
