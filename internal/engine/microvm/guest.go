package microvm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/engine/identity"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/vmm/vmstate"
)

// Guest is a booted Linux guest whose agent has answered.
type Guest struct {
	*process.Process
	// Agent is a session with the guest's agent.
	Agent *guestrpc.Client
}

// dialAgent opens a session with a guest's agent.
func dialAgent(ctx context.Context, p *process.Process) (*Guest, error) {
	ctx, cancel := context.WithTimeout(ctx, identity.AnswerPatience)
	defer cancel()
	conn, err := p.Dial(ctx, guestrpc.AgentPort)
	if err != nil {
		return nil, err
	}
	client, err := guestrpc.NewClient(ctx, conn)
	if err != nil {
		return nil, err
	}
	return &Guest{Process: p, Agent: client}, nil
}

// Shutdown powers the guest off from inside: its processes get grace to end, and its
// disks are synced. A guest that has not powered off some time after the grace is
// stopped.
func (g *Guest) Shutdown(ctx context.Context, grace time.Duration) (vmstate.Exit, error) {
	ctx, cancel := context.WithTimeout(ctx, grace+shutdownMargin)
	defer cancel()
	err := g.Agent.Shutdown(ctx, guestrpc.ShutdownRequest{Mode: guestrpc.PowerOff, Grace: grace})
	if err == nil {
		select {
		case <-g.Done():
		case <-ctx.Done():
			err = fmt.Errorf("shut down: %w", ctx.Err())
		}
	}
	if err != nil {
		g.Kill()
	}
	exit, _ := g.Wait()
	return exit, errors.Join(err, g.Agent.Close())
}

// shutdownMargin is the time that a guest gets beyond the grace of its processes, to
// sync its disks and power off.
const shutdownMargin = 30 * time.Second
