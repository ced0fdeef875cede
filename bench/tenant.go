package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"text/tabwriter"

	"agentrun.dev/api/rest"
	"agentrun.dev/bench/tenants"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/sandbox"
	"golang.org/x/sys/unix"
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
	// Reserve is how much of a full disk is kept free of what tenants store; 0 leaves
	// the full disk out.
	Reserve uint64
}

// TenantsReport is how long a quiet tenant has waited.
type TenantsReport struct {
	Engine string `json:"engine"`
	TenantWaits
	Quota float64 `json:"quota_mib"`
	// FullDisk is the same where the disk has no room beside its reserve, and the hostile
	// tenant has no quota of disk. Reserve is that reserve.
	FullDisk *TenantWaits `json:"full_disk,omitempty"`
	Reserve  float64      `json:"reserve_mib"`
}

// TenantWaits are those beside a busy tenant, and beside a hostile one, and what that was
// answered.
type TenantWaits struct {
	Busy    Waits  `json:"busy"`
	Hostile Waits  `json:"hostile"`
	Answers string `json:"answers"`
}

// Waits are the waiting times beside another tenant.
type Waits struct {
	Claim Summary `json:"claim"`
	Exec  Summary `json:"exec"`
}

// Tenants measures a quiet tenant's claims and execs through REST, first beside a
// tenant that is merely busy, then beside a hostile one; on a disk with room, and then
// on a full one.
func Tenants(ctx context.Context, cfg TenantsConfig) (r *TenantsReport, err error) {
	r = &TenantsReport{Engine: string(cfg.Engine), Quota: float64(cfg.Storage) / (1 << 20), Reserve: float64(cfg.Reserve) / (1 << 20)}
	quota := sandbox.Quota{Namespace: "hostile", Memory: 24 * cfg.Memory, Sandboxes: 16, Storage: cfg.Storage}
	if r.TenantWaits, err = measureTenants(ctx, cfg, quota, nil); err != nil || cfg.Reserve == 0 {
		return r, err
	}
	disk, err := newSmallDisk(filepath.Join(cfg.Folder, "disk"))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, disk.close()) }()
	cfg.Folder, quota.Storage = disk.folder, 0
	full, err := measureTenants(ctx, cfg, quota, func() error { return disk.shrink(cfg.Reserve) })
	r.FullDisk = &full
	return r, err
}

// measureTenants measures on a node of its own. fill may be nil; otherwise it makes the disk
// full before the hostile tenant begins.
func measureTenants(ctx context.Context, cfg TenantsConfig, quota sandbox.Quota, fill func() error) (out TenantWaits, err error) {
	n := &benchNode{}
	defer func() { err = errors.Join(err, n.close()) }()
	root := &rootTemplate{ForkConfig{Guest: cfg.Guest, Program: cfg.Argv[0]}}
	node := nodeConfig{Root: root, Memory: cfg.Memory, Folder: cfg.Folder, Engine: cfg.Engine, Jail: cfg.Jail}
	if fill != nil {
		node.Reserve = cfg.Reserve
	}
	if err := n.open(ctx, node); err != nil {
		return out, err
	}
	socket := filepath.Join(cfg.Folder, "socket")
	c, keys, err := n.serveKeys(ctx, socket)
	if err != nil {
		return out, err
	}
	c.Close()
	var all []tenants.Tenant
	for _, namespace := range []string{"quiet", "busy", "hostile"} {
		t, err := n.tenant(ctx, cfg, socket, namespace, keys)
		if err != nil {
			return out, err
		}
		all = append(all, t)
	}
	quiet, busy, hostile := all[0], all[1], all[2]
	if out.Busy, err = beside(ctx, quiet, cfg.Rounds, func(ctx context.Context) error { return tenants.Busy(ctx, busy, cfg.Busy) }); err != nil {
		return out, err
	}
	if _, err := n.manager.SetQuota(ctx, quota); err != nil {
		return out, err
	}
	if fill != nil {
		if err := fill(); err != nil {
			return out, err
		}
	}
	var answers tenants.Answers
	out.Hostile, err = beside(ctx, quiet, cfg.Rounds, func(ctx context.Context) error {
		tenants.Hostile(ctx, hostile, cfg.Hostile, &answers)
		return nil
	})
	out.Answers = answers.String()
	if err != nil {
		return out, err
	}
	for _, stored := range []string{"checkpoint", "hibernate"} {
		if fill != nil && (answers.Of(stored, "") > 0 || answers.Of(stored, rest.ErrorCodeInsufficientCapacity) == 0) {
			return out, fmt.Errorf("the disk was not full: of what the hostile tenant asked for %s was answered\n%s", stored, out.Answers)
		}
	}
	return out, errors.Join(tenants.Leave(ctx, hostile), tenants.Leave(ctx, busy), tenants.Leave(ctx, quiet))
}

// tenant makes a namespace with a pool of two, and a key for it.
func (n *benchNode) tenant(ctx context.Context, cfg TenantsConfig, socket, namespace string, keys *access.Store) (t tenants.Tenant, err error) {
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

// smallDisk is a file system in memory.
type smallDisk struct{ folder string }

func newSmallDisk(folder string) (*smallDisk, error) {
	if err := os.Mkdir(folder, 0o700); err != nil {
		return nil, err
	}
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "mode=0700"); err != nil {
		return nil, fmt.Errorf("make a small disk, which takes root: %w", err)
	}
	return &smallDisk{folder}, nil
}

// shrink makes the disk so small that three quarters of a reserve are free.
func (d *smallDisk) shrink(reserve uint64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(d.folder, &st); err != nil {
		return fmt.Errorf("fill the disk: %w", err)
	}
	size := (st.Blocks-st.Bfree)*uint64(st.Bsize) + reserve/4*3
	if err := unix.Mount("tmpfs", d.folder, "tmpfs", unix.MS_REMOUNT, fmt.Sprintf("size=%d", size)); err != nil {
		return fmt.Errorf("fill the disk: %w", err)
	}
	return nil
}

func (d *smallDisk) close() error { return unix.Unmount(d.folder, unix.MNT_DETACH) }

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

// Print writes the report as tables.
func (r TenantsReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "a quiet tenant on %s, through REST, beside a busy one and a hostile one with a quota of %.0f MiB of disk; milliseconds\n\n", r.Engine, r.Quota)
	err := r.TenantWaits.print(w)
	if err != nil || r.FullDisk == nil {
		return err
	}
	fmt.Fprintf(w, "\nthe same where the disk is full, but for a reserve of %.0f MiB, as soon as the hostile tenant begins\n\n", r.Reserve)
	return r.FullDisk.print(w)
}

func (r TenantWaits) print(w io.Writer) error {
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
