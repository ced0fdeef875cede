package layer

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Opened is an image with the open files of its layers, in the order of
// Image.Layers.
type Opened struct {
	Image Image
	Files []*os.File
}

// OpenImage pairs an image with its files, which are still the caller's if it fails.
func OpenImage(im Image, files []*os.File) (Opened, error) {
	if err := im.Validate(); err != nil {
		return Opened{}, err
	}
	if len(files) != len(im.Layers) {
		return Opened{}, fmt.Errorf("image of %d layers with %d files", len(im.Layers), len(files))
	}
	for i, f := range files {
		info, err := f.Stat()
		if err != nil {
			return Opened{}, fmt.Errorf("look at layer %s: %w", im.Layers[i].Digest, err)
		}
		if !info.Mode().IsRegular() || uint64(info.Size()) != im.Layers[i].Size {
			return Opened{}, fmt.Errorf("layer %s: %s has %d bytes (%s), the image says %d", im.Layers[i].Digest, f.Name(), info.Size(), info.Mode(), im.Layers[i].Size)
		}
	}
	return Opened{im, files}, nil
}

// Read fills p with the image's content from off on.
func (o Opened) Read(p []byte, off uint64) error {
	for len(p) > 0 {
		e, ok, next := o.Image.Find(off)
		n := min(uint64(len(p)), next-off)
		if !ok {
			clear(p[:n])
		} else if err := o.readLayer(p[:n], e, off); err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}

func (o Opened) readLayer(p []byte, e Extent, off uint64) error {
	at := e.Offset + (off - e.Start)
	_, err := o.Files[e.Layer].ReadAt(p, int64(at))
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF // somebody cut the file off
	}
	if err != nil {
		return fmt.Errorf("read layer %s at %#x: %w", o.Image.Layers[e.Layer].Digest, at, err)
	}
	return nil
}

// Close closes the files.
func (o Opened) Close() error {
	var errs []error
	for _, f := range o.Files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
