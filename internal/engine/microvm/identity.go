package microvm

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/guestrpc"
	"agentrun.dev/internal/vmmctl"
)

// renew gives a fork an identity of its own. A fork that cannot be reseeded is
// not given to anybody.
func (s *sandbox) renew(ctx context.Context, keepIdentity bool) error {
	req := guestrpc.RenewRequest{Generation: s.generation.Load()}
	if !keepIdentity {
		req.Hostname, req.MachineID = s.hostname, randomHex(16)
	}
	return s.renewAs(ctx, req)
}

// renewAs completes a request with what every renewal has, and sends it.
func (s *sandbox) renewAs(ctx context.Context, req guestrpc.RenewRequest) error {
	req.Entropy = make([]byte, entropySize)
	if _, err := rand.Read(req.Entropy); err != nil {
		return fmt.Errorf("draw entropy: %w", err)
	}
	defer clear(req.Entropy)
	req.WallClock = time.Now()
	if _, err := s.Agent().Renew(ctx, req); err != nil {
		return fmt.Errorf("renew the fork's identity: %w", err)
	}
	return nil
}

// entropySize is twice what the kernel's generator is keyed with.
const entropySize = 64

// Claim lets a paused fork go on as another one. The two requests go together:
// the guest finds the second when it wakes up. A machine id it has already.
func (s *sandbox) Claim(ctx context.Context, hostname string) error {
	s.capture.Lock() // a snapshot takes the identity with it
	defer s.capture.Unlock()
	if err := s.folder.Change(func(r *folder.Record) {
		r.Generation = s.generation.Load() + 1
		if hostname != "" {
			r.Hostname = hostname
		}
	}); err != nil {
		return fmt.Errorf("claim: %w", err)
	}
	resumed, err := s.post(func(id uint64) vmmctl.Message { return &vmmctl.Simple{Kind: vmmctl.KindResume, ID: id} })
	if err != nil {
		return fmt.Errorf("claim: %w", err)
	}
	s.paused.Store(false)
	err = s.renewAs(ctx, guestrpc.RenewRequest{Hostname: hostname, Generation: s.generation.Load() + 1})
	if err == nil {
		_, err = s.await(ctx, resumed)
	}
	if err != nil {
		return fmt.Errorf("claim: %w", err)
	}
	s.generation.Add(1)
	if hostname != "" {
		s.hostname = hostname
	}
	return nil
}
