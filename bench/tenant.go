package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"text/tabwriter"

	"agentrun.dev/api/rest"
	"agentrun.dev/bench/tenants"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/sandbox"
)

// TenantsConfig describes a measurement of a quiet tenant beside others.
type TenantsConfig struct {
	Guest
	// Rounds is how many sandboxes the quiet tenant claims, uses and ends beside each
	// other tenant.
	Rounds int
	// Busy is how many workers the busy tenant has. Hostile is how many workers the
	// hostile tenant has for each of its floods.
	Busy, Hostile int
	// Argv is the program that runs in the sandboxes.
	Argv []string
	// Storage is the hostile tenant's quota of disk.
	Storage uint64
}

// TenantsReport is how long a quiet tenant has waited.
type TenantsReport struct {
	Engine  string  `json:"engine"`
	Busy    Waits   `json:"busy"`
	Hostile Waits   `json:"hostile"`
	Answers string  `json:"answers"`
	Quota   float64 `json:"quota_mib"`
}

// Waits are the waiting times beside another tenant.
type Waits struct {
	Claim Summary `json:"claim"`
	Exec  Summary `json:"exec"`
}

// Tenants measures a quiet tenant's claims and execs through REST, first beside a
// tenant that is merely busy, then beside a hostile one.
func Tenants(ctx context.Context, cfg TenantsConfig) (r *TenantsReport, err error) {
	n := &benchNode{}
	defer func() { err = errors.Join(err, n.close()) }()
	root := &rootTemplate{ForkConfig{Guest: cfg.Guest, Program: cfg.Argv[0]}}
	if err := n.open(ctx, nodeConfig{Root: root, Memory: cfg.Memory, Folder: cfg.Folder, Engine: cfg.Engine, Jail: cfg.Jail}); err != nil {
		return nil, err
	}
	socket := filepath.Join(cfg.Folder, "socket")
	c, keys, err := n.serveKeys(ctx, socket)
	if err != nil {
		return nil, err
	}
	c.Close()
	tenant := func(namespace string) (t tenants.Tenant, err error) {
		key, _, err := keys.Create(access.KeySpec{Name: namespace, Role: access.RoleUser, Namespaces: []sandbox.Namespace{sandbox.Namespace(namespace)}})
		if err != nil {
			return t, err
		}
		t = tenants.Tenant{Pool: benchPool, Argv: cfg.Argv, Template: rest.TemplateSpec{Image: benchPool, MilliCPUs: sandbox.DefaultMilliCPUs, Memory: int64(cfg.Memory)}}
		if t.Client, err = client.New(client.Config{Socket: socket, Namespace: namespace, Key: key}); err != nil {
			return t, err
		}
		n.undo = append(n.undo, func() error { t.Client.Close(); return nil })
		if _, err = t.Client.PutTemplate(ctx, benchPool, t.Template); err == nil {
			_, err = t.Client.PutPool(ctx, benchPool, rest.PoolSpec{Template: benchPool, Replicas: 2})
		}
		if err == nil {
			err = n.manager.WaitPool(ctx, sandbox.Key{Namespace: sandbox.Namespace(namespace), Name: benchPool})
		}
		return t, err
	}
	quiet, err := tenant("quiet")
	if err != nil {
		return nil, err
	}
	r = &TenantsReport{Engine: string(cfg.Engine), Quota: float64(cfg.Storage) / (1 << 20)}
	busy, err := tenant("busy")
	if err != nil {
		return nil, err
	}
	if r.Busy, err = beside(ctx, quiet, cfg.Rounds, func(ctx context.Context) error { return tenants.Busy(ctx, busy, cfg.Busy) }); err != nil {
		return nil, err
	}
	hostile, err := tenant("hostile")
	if err != nil {
		return nil, err
	}
	quota := sandbox.Quota{Namespace: "hostile", Memory: 24 * cfg.Memory, Sandboxes: 16, Storage: cfg.Storage}
	if _, err := n.manager.SetQuota(ctx, quota); err != nil {
		return nil, err
	}
	r.Hostile, err = beside(ctx, quiet, cfg.Rounds, func(ctx context.Context) error {
		var answers tenants.Answers
		tenants.Hostile(ctx, hostile, cfg.Hostile, &answers)
		r.Answers = answers.String()
		return nil
	})
	if err != nil {
		return nil, err
	}
	return r, errors.Join(tenants.Leave(ctx, hostile), tenants.Leave(ctx, busy), tenants.Leave(ctx, quiet))
}

// beside measures a quiet tenant while do runs another one.
func beside(ctx context.Context, quiet tenants.Tenant, rounds int, do func(context.Context) error) (Waits, error) {
	other, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- do(other) }()
	times, err := tenants.Quiet(ctx, quiet, rounds)
	stop()
	return Waits{Claim: Summarize(times.Claims), Exec: Summarize(times.Execs)}, errors.Join(err, <-ended)
}

// goalTenants is the goal: beside a hostile tenant, a quiet one waits at most this
// many times as long.
const goalTenants = 3.0

// Print writes the report as a table.
func (r TenantsReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "a quiet tenant on %s, through REST, beside a busy one and a hostile one with a quota of %.0f MiB of disk; milliseconds\n\n", r.Engine, r.Quota)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tn\tp10\tp50\tp90\tp99\t")
	line := func(name string, s Summary) {
		fmt.Fprintf(t, "%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t\n", name, s.N, s.P10, s.P50, s.P90, s.P99)
	}
	line("claim, beside a busy tenant", r.Busy.Claim)
	line("claim, beside a hostile one", r.Hostile.Claim)
	line("exec, beside a busy tenant", r.Busy.Exec)
	line("exec, beside a hostile one", r.Hostile.Exec)
	if err := t.Flush(); err != nil {
		return err
	}
	ratio := func(name string, hostile, busy Summary) {
		fmt.Fprintf(w, "%s: %.2f times as long at p50, %.2f times at p99 (goal %.0f)\n", name, hostile.P50/busy.P50, hostile.P99/busy.P99, goalTenants)
	}
	fmt.Fprintln(w)
	ratio("claims", r.Hostile.Claim, r.Busy.Claim)
	ratio("execs", r.Hostile.Exec, r.Busy.Exec)
	_, err := fmt.Fprintf(w, "\nthe hostile tenant was answered:\n%s", r.Answers)
	return err
}
