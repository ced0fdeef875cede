package forkd

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/bench/tenants"
	"agentrun.dev/internal/client"
	"agentrun.dev/test/soak"
)

// tenant makes a namespace with a pool, and an API key for it.
func (n *node) tenant(namespace string, ready int) tenants.Tenant {
	n.t.Helper()
	ctx := n.t.Context()
	made, err := n.Client.CreateKey(ctx, rest.KeyCreate{Name: namespace, Role: rest.RoleUser, Namespaces: []string{namespace}})
	if err != nil {
		n.t.Fatal(err)
	}
	t := tenants.Tenant{Client: n.in(namespace, made.Text), Pool: "pool", Template: plain(), Argv: []string{"/bin/true"}}
	_, err = t.Client.PutTemplate(ctx, "base", plain())
	if err == nil {
		_, err = t.Client.PutPool(ctx, "pool", rest.PoolSpec{Template: "base", Replicas: ready})
	}
	if err != nil {
		n.t.Fatal(err)
	}
	n.full(t, ready)
	return t
}

// in returns a client of a namespace, with an API key or as the daemon's own
// user.
func (n *node) in(namespace, key string) *client.Client {
	n.t.Helper()
	c, err := client.New(client.Config{Socket: filepath.Join(n.State, "forkd", "socket"), Namespace: namespace, Key: key})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(c.Close)
	return c
}

// full waits until that many sandboxes wait in a tenant's pool.
func (n *node) full(t tenants.Tenant, ready int) {
	n.t.Helper()
	for {
		p, err := t.Client.Pool(n.t.Context(), t.Pool)
		if err != nil || p.Phase == rest.PhaseFailed {
			n.t.Fatalf("%+v, %v", p, err)
		}
		if p.Phase == rest.PhaseReady && p.Ready == ready {
			return
		}
		time.Sleep(50 * time.Millisecond) // the API has nothing to wait on
	}
}

// plain is a template without an interpreter, which is small and quickly built.
func plain() rest.TemplateSpec {
	return rest.TemplateSpec{Image: "python:3.12-slim", MilliCPUs: 1000, Memory: templateMemory}
}

// TestHostileTenant: one tenant floods the daemon with look-ups, builds, forks, tokens of
// terminals, logs, checkpoints and hibernations. No call of another tenant fails. The
// hostile tenant stays within its quota, is refused with insufficient_capacity, and leaves
// nothing behind. build/bench tenants measures the times.
func TestHostileTenant(t *testing.T) {
	n := newNode(t)
	n.up()
	defer n.down()
	if out, err := n.command("image", "import", pythonImage(t)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	quiet, hostile := n.tenant("quiet", 2), n.tenant("hostile", 1)
	admin := n.in("hostile", "")
	before, err := admin.Quota(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const perSnapshot = 2 // times the storage of the template and its pool
	quota := rest.QuotaSpec{Memory: 20 * templateMemory, Sandboxes: 12, Storage: perSnapshot*before.Used.Storage + 64*mib}
	if _, err := admin.PutQuota(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute) // a limit in case something hangs
	defer stop()
	var answers tenants.Answers
	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		tenants.Hostile(ctx, hostile, 2, &answers)
	}()
	bounds := make(chan struct{})
	go func() { // the tenant stays within its quota at any time
		defer close(bounds)
		for ctx.Err() == nil {
			q, err := admin.Quota(ctx)
			if ctx.Err() == nil && (err != nil || q.Used.Memory > quota.Memory || q.Used.Sandboxes > quota.Sandboxes || q.Used.Storage > quota.Storage) {
				t.Errorf("%+v, %v", q, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
	if _, err := tenants.Quiet(t.Context(), quiet, soak.Count(200, 8)); err != nil {
		t.Error(err)
	}
	// The flood continues until every kind of request was refused, however slow the
	// machine is.
	for refused := false; !refused; time.Sleep(20 * time.Millisecond) {
		refused = answers.Of("look-up", rest.ErrorCodeNotFound) > 0 &&
			answers.Of("checkpoint", rest.ErrorCodeInsufficientCapacity)+answers.Of("hibernate", rest.ErrorCodeInsufficientCapacity) > 0
		for _, what := range []string{"build", "fork", "ticket"} {
			refused = refused && answers.Of(what, rest.ErrorCodeInsufficientCapacity) > 0
		}
		if ctx.Err() != nil {
			t.Fatalf("it was not refused what it should be:\n%s", &answers)
		}
	}
	stop()
	<-flooded
	<-bounds
	t.Logf("the hostile tenant was answered:\n%s", &answers)
	for _, unexpected := range answers.Unexpected() {
		t.Error(unexpected)
	}
	if err := tenants.Leave(t.Context(), hostile); err != nil {
		t.Fatal(err)
	}
	n.full(hostile, 1)
	after, err := admin.Quota(t.Context())
	if err != nil || after.Used.Sandboxes != 0 || after.Used.Storage != before.Used.Storage || after.Used.Memory != before.Used.Memory {
		t.Errorf("%+v is left, there was %+v (%v)", after.Used, before.Used, err)
	}
	if _, err := tenants.Quiet(t.Context(), hostile, 1); err != nil {
		t.Errorf("it can be used again: %v", err)
	}
}

// TestFullDisk: on a disk that is full to the last byte, an administrator can list, kill and
// delete, and the audit log records it. Requests of tenants that would store data are
// refused, with the next step. Everything works again when there is space, and a daemon that
// starts on the full disk serves.
func TestFullDisk(t *testing.T) {
	n := newNode(t)
	n.onDisk("size=3g")
	n.up("--storage-reserve", "512M")
	if out, err := n.command("image", "import", pythonImage(t)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	tenant, admin := n.tenant("default", 0), n.in("default", "")
	ctx := t.Context()
	claim := func(name string) error {
		_, err := tenant.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: "pool"}, "")
		return err
	}
	must := func(errs ...error) {
		t.Helper()
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	must(claim("runs"), claim("sleeps"), claim("ends"))
	_, err := tenant.Client.Checkpoint(ctx, "runs", rest.CheckpointCreate{Name: "old"}, "")
	must(err)
	_, err = tenant.Client.Do(ctx, "sleeps", client.Hibernate)
	must(err)

	refused := func(what string, err error) {
		t.Helper()
		if !client.HasCode(err, rest.ErrorCodeInsufficientCapacity) || !strings.Contains(err.Error(), "disk of the node") {
			t.Errorf("%s: %v", what, err)
		}
	}
	stores := func() {
		t.Helper()
		_, err := tenant.Client.Do(ctx, "runs", client.Hibernate)
		refused("hibernate", err)
		_, err = tenant.Client.Checkpoint(ctx, "runs", rest.CheckpointCreate{Name: "new"}, "")
		refused("checkpoint", err)
		spec := plain()
		spec.Env = rest.Env{"NEW": "1"}
		_, err = tenant.Client.PutTemplate(ctx, "new", spec)
		refused("template", err)
	}
	n.fill(400 * mib)
	stores()
	must(claim("late")) // it fits into the reserve
	n.fill(0)
	stores()
	n.Kill()
	n.up("--storage-reserve", "512M")
	stores()
	for _, name := range []string{"ends", "late", "sleeps"} {
		if _, err := admin.Kill(ctx, name); err != nil {
			t.Errorf("end %s: %v", name, err)
		}
	}
	if list, err := admin.Sandboxes(ctx, false); err != nil || len(list) != 1 || list[0].Name != "runs" {
		t.Errorf("%+v, %v", list, err)
	}
	must(admin.DeleteCheckpoint(ctx, "old"))
	if list, err := admin.Checkpoints(ctx); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	for _, verb := range []string{"deleteSandbox", "deleteCheckpoint"} {
		if !n.audited(verb) {
			t.Errorf("the audit log has no %s", verb)
		}
	}
	must(os.Remove(n.filler()))
	_, err = tenant.Client.Do(ctx, "runs", client.Hibernate)
	must(err)
	_, err = tenants.Quiet(ctx, tenant, 1)
	must(err)
	_, err = admin.Kill(ctx, "runs")
	must(err, admin.DeletePool(ctx, "pool"), admin.DeleteTemplate(ctx, "base"))
	if q, err := admin.Quota(ctx); err != nil || q.Used != (rest.QuotaUse{}) {
		t.Errorf("%+v, %v", q, err)
	}
	n.down()
}

// audited reports whether the audit log has the end of an operation.
func (n *node) audited(verb string) bool {
	n.t.Helper()
	b, err := os.ReadFile(filepath.Join(n.State, "forkd", "audit", "audit.log"))
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		var e struct{ Stage, Verb string }
		if json.Unmarshal(line, &e) == nil && e.Stage == "end" && e.Verb == verb {
			return true
		}
	}
	return false
}
