package layer

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Opened is a stack with the open files of its layers, in the order of
// Stack.Layers.
type Opened struct {
	Stack Stack
	Files []*os.File
}

// OpenStack pairs a stack with its files. If it fails, the caller still owns the
// files.
func OpenStack(stack Stack, files []*os.File) (Opened, error) {
	if err := stack.Validate(); err != nil {
		return Opened{}, err
	}
	if len(files) != len(stack.Layers) {
		return Opened{}, fmt.Errorf("stack of %d layers with %d files", len(stack.Layers), len(files))
	}
	for i, f := range files {
		info, err := f.Stat()
		if err != nil {
			return Opened{}, fmt.Errorf("look at layer %s: %w", stack.Layers[i].Digest, err)
		}
		if !info.Mode().IsRegular() || uint64(info.Size()) != stack.Layers[i].Size {
			return Opened{}, fmt.Errorf("layer %s: %s has %d bytes (%s), the stack says %d", stack.Layers[i].Digest, f.Name(), info.Size(), info.Mode(), stack.Layers[i].Size)
		}
	}
	return Opened{stack, files}, nil
}

// Read fills p with the stack's content from off on.
func (o Opened) Read(p []byte, off uint64) error {
	for len(p) > 0 {
		e, ok, next := o.Stack.Find(off)
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
		err = io.ErrUnexpectedEOF // the file was truncated
	}
	if err != nil {
		return fmt.Errorf("read layer %s at %#x: %w", o.Stack.Layers[e.Layer].Digest, at, err)
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
