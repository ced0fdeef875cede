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

// entropySize is twice the key size of the kernel's generator.
const entropySize = 64

// Hex is n random bytes as text.
func Hex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // it never fails: crypto/rand ends the process instead
	return hex.EncodeToString(b)
}

// Hostname makes up a host name for a fork that was given none.
func Hostname() string { return "sandbox-" + Hex(4) }

// Self is the identity of a sandbox, as its engine knows it.
type Self struct {
	Hostname   string
	Generation atomic.Uint64
	Folder     folder.Folder // if empty, the sandbox ends with this process
}

// Renew gives a new fork its identity. With keep the fork keeps its own identity,
// except for seeds, time and generation. A fork that cannot be reseeded must not be
// handed out.
func (s *Self) Renew(ctx context.Context, agent *guestrpc.Client, keep bool) error {
	req := guestrpc.RenewRequest{Generation: s.Generation.Load()}
	if !keep {
		req.Hostname, req.MachineID = s.Hostname, Hex(16)
	}
	return send(ctx, agent, req)
}

// AnswerPatience is how long the agent of a new or claimed sandbox may take to
// answer. An agent that a program in the sandbox had stopped at the capture never
// answers.
const AnswerPatience = time.Minute

// send completes a request with the fields of every renewal.
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

// Claim lets a paused fork go on as a different sandbox. resume sends the request to
// resume, and returns how to wait for it. Both requests are sent together, and the
// agent finds the renewal when it wakes up. The fork has a machine id of its own
// already.
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

// Write stores, in the folder if there is one, the sandbox's process and the other
// fields of r.
func (s *Self) Write(pid int, r folder.Record) error {
	if s.Folder == "" {
		return nil
	}
	r.Hostname, r.Generation = s.Hostname, s.Generation.Load()
	return s.Folder.Write(pid, r)
}
