package layer

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// below reads an image through its open layers.
type below struct {
	image Image
	files []*os.File
}

// openBelow pairs an image with its layer files, in the order of Image.Layers.
func openBelow(im Image, files []*os.File) (below, error) {
	if err := im.Validate(); err != nil {
		return below{}, err
	}
	if len(files) != len(im.Layers) {
		return below{}, fmt.Errorf("image of %d layers with %d files", len(im.Layers), len(files))
	}
	for i, f := range files {
		info, err := f.Stat()
		if err != nil {
			return below{}, fmt.Errorf("look at layer %s: %w", im.Layers[i].Digest, err)
		}
		if !info.Mode().IsRegular() || uint64(info.Size()) != im.Layers[i].Size {
			return below{}, fmt.Errorf("layer %s: %s has %d bytes (%s), the image says %d", im.Layers[i].Digest, f.Name(), info.Size(), info.Mode(), im.Layers[i].Size)
		}
	}
	return below{im, files}, nil
}

// read fills p with the image's content from off on.
func (b below) read(p []byte, off uint64) error {
	for len(p) > 0 {
		e, ok, next := b.image.Find(off)
		n := min(uint64(len(p)), next-off)
		if !ok {
			clear(p[:n])
		} else if err := b.readLayer(p[:n], e, off); err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}

func (b below) readLayer(p []byte, e Extent, off uint64) error {
	at := e.Offset + (off - e.Start)
	_, err := b.files[e.Layer].ReadAt(p, int64(at))
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF // somebody cut the file off
	}
	if err != nil {
		return fmt.Errorf("read layer %s at %#x: %w", b.image.Layers[e.Layer].Digest, at, err)
	}
	return nil
}

func (b below) close() error {
	var errs []error
	for _, f := range b.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
