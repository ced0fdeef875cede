package node

import (
	"context"
	"errors"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/sandbox"
)

// parked is a machine without a sandbox.
type parked struct {
	engine.Sandbox
	manager *Manager
	id      sandbox.ID

	namespace sandbox.Namespace
	memory    uint64
	held      []sandbox.Held
	waited    bool // whether it has waited in a pool before its claim
	// connected is the machine with its network, for its claim; nil before.
	connected engine.Sandbox
}

// Close ends the machine and removes the rest of it.
func (p *parked) Close() error {
	m := p.manager
	machine := p.Sandbox
	if p.connected != nil {
		machine = p.connected
	}
	err := errors.Join(machine.Close(), m.cfg.Engine.Remove(context.WithoutCancel(m.ctx), m.machineDir(p.id)))
	m.capacity.release(p.namespace, p.memory, p.held...)
	m.unpark(p.id)
	m.refill()
	return err
}

// finish makes a fork of a build ready.
func (m *Manager) finish(ctx context.Context, s *stock, sb engine.Sandbox) error {
	if s.build.Stage != sandbox.AfterInit {
		return nil
	}
	connected, err := m.joinBuild(ctx, s.build.Template.Namespace, s.spec, sb)
	if err != nil {
		return err
	}
	if j, ok := connected.(*joined); ok {
		defer j.network.Leave(j.now()) // until it is claimed
	}
	return m.cfg.Builder.Finish(ctx, s.spec, s.build.Built, sb)
}
