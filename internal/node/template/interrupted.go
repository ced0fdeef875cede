package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/image"
)

// endPatience is how long the end of a sandbox may take to be known after its agent has
// gone.
const endPatience = 5 * time.Second

// whyCutOff adds to the error of a build why its sandbox has ended, if it has: the agent
// only shows that it is gone. Whoever has cut the build off himself knows why.
func whyCutOff(ctx context.Context, sb engine.Sandbox, err error) error {
	if err == nil || ctx.Err() != nil || sb.Agent().Err() == nil {
		return err
	}
	select {
	case <-sb.Done():
		return fmt.Errorf("%w: %w", err, sb.Wait())
	case <-time.After(endPatience):
		return err
	}
}

// unavailable reports whether a registry could not be asked, or had no answer, for a reason
// that may be gone a moment later.
func unavailable(err error) bool {
	var passing interface{ Temporary() bool } // of a connection, or of an HTTP answer
	var unreachable *image.Unreachable
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return false
	case errors.As(err, &unreachable):
		return true // for whatever reason: how often it is tried must not tell which
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.ErrUnexpectedEOF):
		return true
	}
	return errors.As(err, &passing) && passing.Temporary()
}
