package disk

import (
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
)

// Frozen is a disk as it was when Freeze was called. It can be read while the
// disk is in use, until the next call of Prepare.
type Frozen struct {
	view
	disk *Disk
	// since is what was written after the stack that Changed speaks of.
	since bitmap
}

// maxAside is how many files a disk puts aside; Prepare merges what is more.
const maxAside = 2

// Prepare makes a file ready to become the disk's top, and makes room for the
// one that it replaces: what was put aside before becomes one file. The disk
// may be in use, Frozen ones of it not any more.
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
	// Nobody reads what is overwritten here: the upper file has it too.
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

// Freeze puts the top aside and takes a prepared file, which belongs to the
// disk from then on, in its place. The disk must not be in use meanwhile.
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

// Changed is Disk.Changed for the instant of Freeze. It lists what was written
// since Rebase was last called, and what include says.
func (f *Frozen) Changed(include []extent.Run) (runs, zeros []extent.Run) {
	return f.changed(&f.since, include)
}

// WriteChanged writes the content of runs, one after the other.
func (f *Frozen) WriteChanged(w io.Writer, runs []extent.Run) error { return f.writeRuns(w, runs) }

// Rebase says that somebody else keeps what Changed listed: the next Changed
// will not list it again. The disk must not be frozen meanwhile.
func (f *Frozen) Rebase() {
	// What was written after Freeze is in the top and not yet in since.
	f.disk.since = newBitmap(f.below.Stack.Size / blockSize)
}

// clear makes blocks of a stage zeros.
func (d *Disk) clear(s *stage, off, end uint64) error {
	err := punchHole(s.fd, off, end)
	if errors.Is(err, errors.ErrUnsupported) {
		return writeZeros(s.file, off, end)
	}
	return err
}
