package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
)

// Copy copies a layer, a regular file from its beginning, and refuses one that
// is not what ref says: what it wrote until then is to be thrown away.
func Copy(ctx context.Context, dst io.Writer, src *os.File, ref Ref) error {
	info, err := src.Stat()
	if err != nil {
		return err
	}
	in := io.Reader(src)
	if info.Mode().IsRegular() {
		if uint64(info.Size()) != ref.Size {
			return fmt.Errorf("%s has %d bytes, %d are expected", src.Name(), info.Size(), ref.Size)
		}
		in = io.NewSectionReader(src, 0, info.Size())
	}
	out := NewWriter(dst)
	buf := make([]byte, chunkSize)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		// One byte more than expected shows that there is too much.
		n, err := io.ReadFull(in, buf[:min(chunkSize, ref.Size+1-out.n)])
		if _, werr := out.Write(buf[:n]); werr != nil {
			return fmt.Errorf("copy %s: %w", src.Name(), werr)
		}
		if out.n > ref.Size {
			return fmt.Errorf("%s has more than the %d bytes that are expected", src.Name(), ref.Size)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("copy %s: %w", src.Name(), err)
		}
	}
	switch got := out.Ref(); {
	case got.Size != ref.Size:
		return fmt.Errorf("%s has %d bytes, %d are expected", src.Name(), got.Size, ref.Size)
	case got.Digest != ref.Digest:
		return fmt.Errorf("%s is damaged: its digest is %s, expected is %s", src.Name(), got.Digest, ref.Digest)
	}
	return nil
}
