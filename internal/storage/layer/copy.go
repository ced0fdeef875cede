package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
)

// ErrDamaged means that the data is not the layer that its Ref names.
var ErrDamaged = errors.New("the layer is damaged")

// damage describes how the data differs from the layer.
type damage string

func damaged(format string, args ...any) error { return damage(fmt.Sprintf(format, args...)) }

func (d damage) Error() string        { return string(d) }
func (d damage) Is(target error) bool { return target == ErrDamaged }

// Copy copies a layer from its source: a regular file, from its beginning, or any
// other reader. It fails if the data does not match ref. The caller must then
// discard all that it has written.
func Copy(ctx context.Context, dst io.Writer, src io.Reader, ref Ref) error {
	name, in := "the layer", src
	if f, ok := src.(*os.File); ok {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		name = f.Name()
		if info.Mode().IsRegular() {
			if uint64(info.Size()) != ref.Size {
				return damaged("%s has %d bytes, %d are expected", name, info.Size(), ref.Size)
			}
			in = io.NewSectionReader(f, 0, info.Size())
		}
	}
	out := NewWriter(dst)
	buf := make([]byte, chunkSize)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		// One byte more than expected shows that the source is too long.
		n, err := io.ReadFull(in, buf[:min(chunkSize, ref.Size+1-out.n)])
		if _, werr := out.Write(buf[:n]); werr != nil {
			return fmt.Errorf("copy %s: %w", name, werr)
		}
		if out.n > ref.Size {
			return damaged("%s has more than the %d bytes that are expected", name, ref.Size)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("copy %s: %w", name, err)
		}
	}
	switch got := out.Ref(); {
	case got.Size != ref.Size:
		return damaged("%s has %d bytes, %d are expected", name, got.Size, ref.Size)
	case got.Digest != ref.Digest:
		return damaged("%s is damaged: its digest is %s, expected is %s", name, got.Digest, ref.Digest)
	}
	return nil
}
