package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
	nodeserver "agentrun.dev/internal/server/node"
	"agentrun.dev/internal/server/remote"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// DaemonChurn measures clients that claim a sandbox and end it, again and again,
// through gRPC.
type DaemonChurn struct {
	Clients int `json:"clients"`
	// Synced is false if commits do not wait for the disk. Added is the time added to
	// each commit.
	Synced bool    `json:"synced"`
	Added  float64 `json:"added_to_commit_ms"`
	// PerSecond is how many sandboxes were claimed and ended in one second.
	PerSecond float64 `json:"per_second"`
	Claim     Summary `json:"claim"`
	Kill      Summary `json:"kill"`
	// Get measures one more client, which looks up a hundred sandboxes a second
	// meanwhile.
	Get Summary `json:"get_beside"`
}

// churnRun is a part of one measurement.
type churnRun struct {
	state   *nodeState
	clients int
	cost    journal.Cost
	added   time.Duration

	took             time.Duration
	claim, kill, get []time.Duration
}

// measureChurn measures with fsync, without it, and with slow commits, alternating.
func measureChurn(ctx context.Context, cfg DaemonConfig, full, unsynced *nodeState) (out []DaemonChurn, err error) {
	runs := []*churnRun{
		{state: full, clients: cfg.Clients},
		{state: unsynced, clients: cfg.Clients, cost: journal.Cost{NoSync: true}},
		{state: full, clients: cfg.SlowClients, added: cfg.Added, cost: journal.Cost{Before: func() { time.Sleep(cfg.Added) }}},
	}
	for round := range cfg.Rounds {
		for _, r := range runs {
			if err := r.do(ctx, round, cfg.For); err != nil {
				return nil, err
			}
		}
	}
	for _, r := range runs {
		out = append(out, DaemonChurn{
			Clients: r.clients, Synced: !r.cost.NoSync, Added: float64(r.added) / 1e6,
			PerSecond: float64(len(r.kill)) / r.took.Seconds(), Claim: Summarize(r.claim), Kill: Summarize(r.kill), Get: Summarize(r.get),
		})
	}
	return out, nil
}

// do lets the clients claim and end sandboxes for d.
func (r *churnRun) do(ctx context.Context, round int, d time.Duration) (err error) {
	n, err := r.state.open(ctx, r.cost)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	services, err := n.serveNode(ctx, r.clients+1)
	if err != nil {
		return err
	}
	settle()
	var stop atomic.Bool
	var clients sync.WaitGroup
	claim, kill, errs := make([][]time.Duration, r.clients), make([][]time.Duration, r.clients), make([]error, r.clients)
	var lookErr error
	begin := time.Now()
	timer := time.AfterFunc(d, func() { stop.Store(true) })
	defer timer.Stop()
	clients.Go(func() { lookErr = r.lookUp(ctx, services[r.clients], &stop) })
	for c, service := range services[:r.clients] {
		clients.Go(func() {
			for i := 0; !stop.Load(); i++ {
				k := benchKey(fmt.Sprintf("churn-%d-%d-%d", round, c, i))
				start := time.Now()
				if _, _, errs[c] = service.Claim(ctx, sandbox.ClaimRequest{Key: k, Spec: sandbox.ClaimSpec{Pool: benchPool}}); errs[c] != nil {
					return
				}
				claimed := time.Now()
				if _, errs[c] = service.Kill(ctx, k); errs[c] != nil {
					return
				}
				claim[c], kill[c] = append(claim[c], claimed.Sub(start)), append(kill[c], time.Since(claimed))
			}
		})
	}
	clients.Wait()
	r.took += time.Since(begin)
	for c := range r.clients {
		r.claim, r.kill = append(r.claim, claim[c]...), append(r.kill, kill[c]...)
	}
	return errors.Join(errors.Join(errs...), lookErr)
}

// lookUp looks up sandboxes all the time, but too rarely to be a load.
func (r *churnRun) lookUp(ctx context.Context, service *remote.Service, stop *atomic.Bool) error {
	next := time.NewTicker(10 * time.Millisecond)
	defer next.Stop()
	for i := 0; !stop.Load(); i++ {
		<-next.C
		begin := time.Now()
		if _, err := service.Sandbox(ctx, recordKey(i%r.state.records)); err != nil {
			return err
		}
		r.get = append(r.get, time.Since(begin))
	}
	return nil
}

// guard opens the keys and the audit log of the node.
func (n *benchNode) guard(folder string) (server.Config, error) {
	cfg := server.Config{Service: n.manager, Version: "bench", Log: slog.New(slog.DiscardHandler)}
	keys, err := access.Open(n.manager.Journal())
	if err != nil {
		return cfg, err
	}
	n.undo = append(n.undo, func() error { keys.Close(); return nil })
	trail, err := audit.Open(audit.Config{Dir: filepath.Join(folder, "audit"), Failed: func(error) {}})
	if err != nil {
		return cfg, err
	}
	n.undo = append(n.undo, trail.Close)
	cfg.Access, cfg.Audit = keys, trail
	return cfg, nil
}

// serveNode serves the node's gRPC API as the daemon does, and returns clients of it,
// each with a connection of its own.
func (n *benchNode) serveNode(ctx context.Context, clients int) ([]*remote.Service, error) {
	cfg, err := n.guard(n.folder)
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(n.folder, "node.sock")
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	s := nodeserver.New(cfg)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	n.undo = append(n.undo, func() error {
		s.Stop()
		return <-served
	})
	out := make([]*remote.Service, clients)
	for i := range out {
		conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, err
		}
		n.undo = append(n.undo, conn.Close)
		out[i] = remote.New(conn)
	}
	return out, nil
}
