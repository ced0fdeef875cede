package layer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/storage/extent"
)

// chunkSize is how many bytes are read at once.
const chunkSize = 256 << 10

// Compact writes one new layer with all pages of stack that are not zero, and
// returns the stack of that layer. It keeps zero pages in gaps that Gather
// closes. A stack of zeros has no layer, so Compact writes none. It closes the
// files that open returns.
func Compact(ctx context.Context, stack Stack, open func(Ref) (*os.File, error), w io.Writer) (Stack, error) {
	if err := stack.Validate(); err != nil {
		return Stack{}, fmt.Errorf("compact: %w", err)
	}
	var files []*os.File
	defer func() { _ = Opened{Files: files}.Close() }() // the files were only read
	for _, ref := range stack.Layers {
		f, err := open(ref)
		if err != nil {
			return Stack{}, fmt.Errorf("compact: open layer %s: %w", ref.Digest, err)
		}
		files = append(files, f)
	}
	src, err := OpenStack(stack, files)
	if err != nil {
		return Stack{}, fmt.Errorf("compact: %w", err)
	}
	read := func(p []byte, off uint64) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return src.Read(p, off)
	}
	runs, err := used(stack.Extents, read)
	if err != nil {
		return Stack{}, fmt.Errorf("compact: %w", err)
	}
	runs = Gather(runs)
	out := NewWriter(w)
	if err := CopyRuns(out, runs, read); err != nil {
		return Stack{}, fmt.Errorf("compact: %w", err)
	}
	return Overlay(Stack{Size: stack.Size}, out.Ref(), runs, nil)
}

// Reader fills p with the content at off.
type Reader func(p []byte, off uint64) error

// used finds the pages of the extents that are not zero.
func used(extents []Extent, read Reader) ([]extent.Run, error) {
	covered := make([]extent.Run, 0, len(extents))
	for _, e := range extents {
		covered = append(covered, extent.Run{Start: e.Start, Length: e.Length})
	}
	var runs []extent.Run
	err := EachChunk(covered, read, func(p []byte, off uint64) error {
		for i := 0; i < len(p); i += PageSize {
			if bytes.Equal(p[i:i+PageSize], zeroPage[:]) {
				continue
			}
			at := off + uint64(i)
			runs = extent.Append(runs, at, at+PageSize)
		}
		return nil
	})
	return runs, err
}

var zeroPage [PageSize]byte

// CopyRuns writes the content of runs, one after the other.
func CopyRuns(w io.Writer, runs []extent.Run, read Reader) error {
	return EachChunk(runs, read, func(p []byte, _ uint64) error {
		if _, err := w.Write(p); err != nil {
			return fmt.Errorf("write layer: %w", err)
		}
		return nil
	})
}

// EachChunk reads the runs piece by piece and passes each piece to do.
func EachChunk(runs []extent.Run, read Reader, do func(p []byte, off uint64) error) error {
	buf := make([]byte, chunkSize)
	for _, r := range runs {
		for off := r.Start; off < r.End(); {
			p := buf[:min(chunkSize, r.End()-off)]
			if err := read(p, off); err != nil {
				return err
			}
			if err := do(p, off); err != nil {
				return err
			}
			off += uint64(len(p))
		}
	}
	return nil
}
