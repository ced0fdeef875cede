package identity

import (
	"context"
	"fmt"
	"time"

	"agentrun.dev/internal/guest/guestrpc"
)

// clockPatience is how long an agent may take to set its clock. Any living agent
// needs less. The bound keeps a sandbox from blocking its Resume forever.
const clockPatience = 30 * time.Second

// SetClock sets the wall clock of a sandbox that has booted or was paused. The agent of
// a template that an older AgentRun has built cannot do that. Such a sandbox goes on
// with the clock that it has, which is behind by the pause.
func SetClock(ctx context.Context, agent *guestrpc.Client) error {
	if !agent.Can(guestrpc.CanSetClock) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, clockPatience)
	defer cancel()
	if err := agent.SetClock(ctx, guestrpc.SetClockRequest{WallClock: time.Now()}); err != nil {
		return fmt.Errorf("set the wall clock: %w", err)
	}
	return nil
}
