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

// endPatience bounds the wait for the end of a sandbox after its agent has gone.
const endPatience = 5 * time.Second

// whyCutOff adds the reason for the end of the sandbox to a build's error, if the
// sandbox has ended: the agent only shows that it is gone. It adds nothing if the caller
// has cancelled the build.
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

// unavailable reports whether a registry could not be reached, or did not answer, for a
// reason that may soon be gone.
func unavailable(err error) bool {
	var passing interface{ Temporary() bool } // of a connection, or of an HTTP answer
	var unreachable *image.Unreachable
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return false
	case errors.As(err, &unreachable):
		return true // for any reason: the number of attempts must not tell which
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.ErrUnexpectedEOF):
		return true
	}
	return errors.As(err, &passing) && passing.Temporary()
}
