package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/layer"
)

// FillLayer makes a layer: it calls fill with a file of zeros of the layer's
// size, and fails if the result does not match ref. Ranges that fill does not
// write stay holes. FillLayer does not work for a private snapshot, because
// these layers are not sealed.
func (b *Builder) FillLayer(ctx context.Context, ref layer.Ref, fill func(*os.File) error) error {
	if b.Private() {
		return fmt.Errorf("fill layer %s: %w", ref.Digest, ErrPrivate)
	}
	if done, err := b.has(ref); done || err != nil {
		return err
	}
	name := ref.Digest.String()
	f, err := b.layers.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return fmt.Errorf("fill layer: %w", err)
	}
	err = f.Truncate(int64(ref.Size))
	if err == nil {
		err = fill(f)
	}
	if err == nil {
		err = layer.Copy(ctx, io.Discard, f, ref)
	}
	if err == nil {
		err = durable.Sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(fmt.Errorf("fill layer %s: %w", ref.Digest, err), b.layers.Remove(name))
	}
	b.added[ref.Digest] = stored{size: ref.Size}
	return nil
}
