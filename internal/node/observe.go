package node

import (
	"context"

	"agentrun.dev/internal/sandbox"
)

// Begin tells the manager's observer of something that is done in the sandbox.
func (u *Use) Begin(ctx context.Context, op sandbox.Op) (context.Context, func(error)) {
	ctx, end := u.member.manager.observer.Begin(ctx, u.Sandbox.Work(op))
	return ctx, func(err error) { end(sandbox.Outcome{Err: err}) }
}
