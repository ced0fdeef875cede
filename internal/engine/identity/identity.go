// Package identity gives forks identities of their own, on any engine: host name,
// machine id, generation, random numbers and the time.
package identity

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/guest/guestrpc"
)

// entropySize is twice what the kernel's generator is keyed with.
const entropySize = 64

// Hex is n random bytes as text.
func Hex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // it never fails: crypto/rand ends the process instead
	return hex.EncodeToString(b)
}

// Hostname is one for a fork that was given none.
func Hostname() string { return "sandbox-" + Hex(4) }

// Self is who a sandbox is, to its engine.
type Self struct {
	Hostname   string
	Generation atomic.Uint64
	Folder     folder.Folder // empty: it ends with this process
}

// Renew gives a fork that has just been made its identity, or leaves it the one
// that it has but for seeds, time and generation. A fork that cannot be reseeded
// is not given to anybody.
func (s *Self) Renew(ctx context.Context, agent *guestrpc.Client, keep bool) error {
	req := guestrpc.RenewRequest{Generation: s.Generation.Load()}
	if !keep {
		req.Hostname, req.MachineID = s.Hostname, Hex(16)
	}
	return send(ctx, agent, req)
}

// AnswerPatience is how long the agent of a sandbox that has just been made, or is claimed,
// may take to answer. One that stood still when it was captured never does: a program of
// its own has stopped it.
const AnswerPatience = time.Minute

// send completes a request with what every renewal has.
func send(ctx context.Context, agent *guestrpc.Client, req guestrpc.RenewRequest) error {
	req.Entropy = make([]byte, entropySize)
	if _, err := rand.Read(req.Entropy); err != nil {
		return fmt.Errorf("draw entropy: %w", err)
	}
	defer clear(req.Entropy)
	req.WallClock = time.Now()
	ctx, cancel := context.WithTimeout(ctx, AnswerPatience)
	defer cancel()
	if _, err := agent.Renew(ctx, req); err != nil {
		return fmt.Errorf("renew the fork's identity: %w", err)
	}
	return nil
}

// Claim lets a paused fork go on as another one. resume asks for that and returns
// how to wait for it: the two requests go together, and the agent finds the second
// when it wakes up. A machine id it has already.
func (s *Self) Claim(ctx context.Context, agent *guestrpc.Client, hostname string, resume func() (wait func(context.Context) error, err error)) error {
	if err := s.claim(ctx, agent, hostname, resume); err != nil {
		return fmt.Errorf("claim: %w", err)
	}
	s.Generation.Add(1)
	if hostname != "" {
		s.Hostname = hostname
	}
	return nil
}

func (s *Self) claim(ctx context.Context, agent *guestrpc.Client, hostname string, resume func() (func(context.Context) error, error)) error {
	next := s.Generation.Load() + 1
	if err := s.Folder.Change(func(r *folder.Record) {
		r.Generation = next
		if hostname != "" {
			r.Hostname = hostname
		}
	}); err != nil {
		return err
	}
	wait, err := resume()
	if err != nil {
		return err
	}
	if err := send(ctx, agent, guestrpc.RenewRequest{Hostname: hostname, Generation: next}); err != nil {
		return err
	}
	return wait(ctx)
}

// Write says in the folder, if there is one, which process the sandbox is, and what else r
// has of it.
func (s *Self) Write(pid int, r folder.Record) error {
	if s.Folder == "" {
		return nil
	}
	r.Hostname, r.Generation = s.Hostname, s.Generation.Load()
	return s.Folder.Write(pid, r)
}
