package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// puller is a builder that pulls images of 3 MiB, unless they are called local, and makes
// snapshots of 1 MiB.
type puller struct {
	builder

	mu     sync.Mutex      // protects all following fields
	images map[string]bool // as a template names them, or with the namespace that pulled them
	busy   bool            // an image that is dropped is in use
}

func nameIn(n sandbox.Namespace, name string) string { return string(n) + " " + name }

func (p *puller) Build(ctx context.Context, req BuildRequest) (sandbox.Built, error) {
	if own := nameIn(req.Namespace, req.Spec.Image); !p.has(req.Spec.Image) && !p.has(own) {
		if err := req.Pull(); err != nil {
			return sandbox.Built{}, err
		}
		p.mu.Lock()
		p.images[own] = true
		p.mu.Unlock()
	}
	built, err := p.builder.Build(ctx, req)
	built.Image, built.Pulled = "sha256:"+req.Spec.Image, 3*mib
	return built, err
}

func (p *puller) has(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.images[name]
}

func (p *puller) DropImage(_ context.Context, n sandbox.Namespace, name string) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.busy {
		delete(p.images, pulledImage{n, name}.key())
	}
	return !p.busy, nil
}

// wantStored checks what of a namespace is on disk, but for logs, which are short.
func wantStored(t *testing.T, m *Manager, n sandbox.Namespace, mibs uint64) {
	t.Helper()
	synctest.Wait()
	q, err := m.QuotaOf(t.Context(), n)
	if err != nil || q.UsedStorage/mib != mibs {
		t.Errorf("%d bytes of %s are stored, not %d MiB (%v)", q.UsedStorage, n, mibs, err)
	}
}

// TestStorageOfBuilds: the snapshots and logs of a namespace's templates count in its
// quota until they are deleted, and so does, once, each image that builds have pulled for
// them. The next daemon counts them, too. Images that an administrator has put there
// stay, and count for no namespace.
func TestStorageOfBuilds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		p := &puller{builder: builder{pages: layerPages}, images: map[string]bool{"local": true}}
		open := func() *Manager { return daemon(t, dir, h, func(c *Config) { c.Builder = p }) }
		m := open()
		defer func() { _ = m.Close() }()
		ctx := t.Context()
		apply := func(k sandbox.Key, image string) {
			t.Helper()
			must(t, second(m.ApplyTemplate(ctx, k, sandbox.TemplateSpec{Image: image, MilliCPUs: 1000, Memory: 64 * mib})))
			synctest.Wait()
		}
		own, with := sandbox.DefaultNamespace, uint64(1) // MiB of a snapshot
		const image = 3
		apply(key("one"), "local")
		wantStored(t, m, own, with)
		apply(key("two"), "remote")
		wantStored(t, m, own, 2*with+image)
		apply(key("three"), "remote")
		wantStored(t, m, own, 3*with+image)
		apply(other("one"), "remote")
		wantStored(t, m, "other", with+image)
		must(t, m.Close())
		m = open()
		wantStored(t, m, own, 3*with+image)
		wantStored(t, m, "other", with+image)
		must(t, m.DeleteTemplate(ctx, key("two")))
		wantStored(t, m, own, 2*with+image)
		apply(key("three"), "local") // a revision without it
		wantStored(t, m, own, 2*with)
		if p.has(nameIn(own, "remote")) {
			t.Error("the namespace has the image still")
		}
		if !p.has(nameIn("other", "remote")) {
			t.Error("the image of another namespace's template was dropped")
		}
		p.busy = true
		must(t, m.DeleteTemplate(ctx, other("one")))
		wantStored(t, m, "other", 0)
		p.busy = false
		must(t, m.DeleteTemplate(ctx, key("one")), m.DeleteTemplate(ctx, key("three")))
		wantStored(t, m, own, 0)
		if len(p.images) != 1 || !p.has("local") {
			t.Errorf("the images that are left: %v", p.images)
		}
		if q, err := m.QuotaOf(ctx, own); err != nil || q.UsedStorage != 0 {
			t.Errorf("%d bytes are left (%v)", q.UsedStorage, err)
		}
	})
}

// TestPulledBefore: an image that an AgentRun has pulled in which images belonged to no
// namespace is published, counts for each namespace whose templates name it, and goes with
// the last of them.
func TestPulledBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		p := &puller{builder: builder{pages: layerPages}, images: map[string]bool{"old": true}}
		m := daemon(t, dir, h, func(c *Config) { c.Builder = p })
		defer func() { _ = m.Close() }()
		must(t, m.db.Update(func(tx *journal.Tx) error { return pulled.Put(tx, "old", pulledImage{Name: "old"}) }))
		for _, k := range []sandbox.Key{key("a"), other("a")} {
			must(t, second(m.ApplyTemplate(t.Context(), k, sandbox.TemplateSpec{Image: "old", MilliCPUs: 1000, Memory: 64 * mib})))
		}
		wantStored(t, m, sandbox.DefaultNamespace, 4)
		wantStored(t, m, "other", 4)
		must(t, m.DeleteTemplate(t.Context(), key("a")))
		if !p.has("old") {
			t.Error("it went while another namespace's template named it")
		}
		must(t, m.DeleteTemplate(t.Context(), other("a")))
		if p.has("old") {
			t.Error("it is left")
		}
	})
}

// TestBuildBeyondQuota: a build that its quota has no room for leaves nothing, not even the
// image, and is made once there is room; with a quota that is used up already none is begun.
func TestBuildBeyondQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &puller{builder: builder{pages: layerPages}, images: map[string]bool{}}
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Builder = p })
		defer func() { _ = m.Close() }()
		ctx := t.Context()
		quota := func(bytes uint64) {
			t.Helper()
			must(t, second(m.SetQuota(ctx, sandbox.Quota{Namespace: sandbox.DefaultNamespace, Storage: bytes})))
		}
		spec := sandbox.TemplateSpec{Image: "remote", MilliCPUs: 1000, Memory: 64 * mib}
		quota(2 * mib)
		must(t, second(m.ApplyTemplate(ctx, key("a"), spec)))
		synctest.Wait()
		built, err := m.Template(ctx, key("a"))
		must(t, err)
		found, err := m.Builds(ctx, built)
		if err != nil || len(found) != 1 || found[0].Phase != sandbox.PhasePending || !strings.Contains(found[0].Problem, "quota of namespace default") {
			t.Errorf("%+v, %v", found, err)
		}
		wantStored(t, m, sandbox.DefaultNamespace, 0)
		wantFolders(t, m, snapshotsDir, 0)
		if len(p.images) > 0 {
			t.Error("its image is left")
		}
		quota(5 * mib)
		synctest.Wait()
		must(t, waitBuilt(t, m, "a"))
		wantStored(t, m, sandbox.DefaultNamespace, 4)
		quota(4 * mib)
		_, err = m.ApplyTemplate(ctx, key("b"), spec)
		wantOver(t, "a template with a full quota", err)
		if list, err := m.Templates(ctx, sandbox.DefaultNamespace, sandbox.Page{}); err != nil || len(list) != 1 {
			t.Errorf("%d templates, %v", len(list), err)
		}
	})
}

// TestImageOfFailedBuild: an image that was pulled for a build that fails then counts as long as
// it is there, for the next daemon, too, and goes where the quota has no room for it: templates
// that fail on purpose fill no disk.
func TestImageOfFailedBuild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), nodetest.NewHost(t)
		p := &puller{builder: builder{fail: errors.New("init command 1: exit status 1")}, images: map[string]bool{}}
		open := func() *Manager { return daemon(t, dir, h, func(c *Config) { c.Builder = p }) }
		m := open()
		defer func() { _ = m.Close() }()
		ctx, own := t.Context(), sandbox.DefaultNamespace
		must(t, second(m.SetQuota(ctx, sandbox.Quota{Namespace: own, Storage: 5 * mib})))
		apply := func(k sandbox.Key, image string) {
			t.Helper()
			must(t, second(m.ApplyTemplate(ctx, k, sandbox.TemplateSpec{Image: image, MilliCPUs: 1000, Memory: 64 * mib})))
			synctest.Wait()
		}
		apply(key("a"), "one")
		wantStored(t, m, own, 3)
		must(t, m.Close())
		m = open()
		wantStored(t, m, own, 3)
		apply(key("b"), "one") // the same image
		wantStored(t, m, own, 3)
		apply(key("a"), "one") // it is tried again
		wantStored(t, m, own, 3)
		apply(key("c"), "two")
		wantStored(t, m, own, 3)
		if !p.has(nameIn(own, "one")) || p.has(nameIn(own, "two")) {
			t.Errorf("with room for one image there are %v", p.images)
		}
		must(t, m.DeleteTemplate(ctx, key("a")), m.DeleteTemplate(ctx, key("b")), m.DeleteTemplate(ctx, key("c")))
		if q, err := m.QuotaOf(ctx, own); err != nil || q.UsedStorage != 0 || len(p.images) != 0 {
			t.Errorf("%d bytes are left, and images %v (%v)", q.UsedStorage, p.images, err)
		}
	})
}

// waitBuilt waits until a template is built.
func waitBuilt(t *testing.T, m *Manager, name string) error {
	t.Helper()
	must(t, second(m.ApplyPool(t.Context(), key(name), sandbox.PoolSpec{Template: sandbox.Name(name)})))
	return m.WaitPool(t.Context(), key(name))
}

// TestBuildsOfOneNamespace: a namespace has a bounded number of builds, and leaves turns to
// another however many wait.
func TestBuildsOfOneNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Builder, c.Builds = &builder{gate: gate}, 2 })
		defer func() { _ = m.Close() }()
		ctx := t.Context()
		spec := sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}
		var refused []error
		for i := range maxBuilds + 10 {
			name := "t-" + strings.Repeat("x", i/20) + string(rune('a'+i%20))
			if _, err := m.ApplyTemplate(ctx, key(name), spec); err != nil {
				refused = append(refused, err)
			}
		}
		if len(refused) != 10 || slices.ContainsFunc(refused, func(err error) bool { return !sandbox.HasCode(err, sandbox.CodeCapacity) }) {
			t.Errorf("%d were refused: %v", len(refused), refused)
		}
		must(t, second(m.ApplyTemplate(ctx, other("quiet"), spec)))
		synctest.Wait()
		if o := m.Overview().Turns[WorkBuild]; o.Held != 2 || o.Waiting != maxBuilds-1 {
			t.Errorf("%+v", o)
		}
		close(gate)
		synctest.Wait()
		if o := m.Overview(); o.Turns[WorkBuild].Waiting != 0 || o.Builds != 0 {
			t.Errorf("%+v", o)
		}
		must(t, second(m.ApplyTemplate(ctx, key("late"), spec)))
	})
}

// talker is a builder whose builds write much and fail.
type talker struct{ builder }

func (*talker) Build(_ context.Context, req BuildRequest) (sandbox.Built, error) {
	if _, err := req.Log.Write(make([]byte, 600<<10)); err != nil {
		return sandbox.Built{}, err
	}
	return sandbox.Built{}, errors.New("it does not work")
}

// TestLogsStayInQuota: logs of builds that have failed take no more of the disk than the quota
// has room for. One that is not kept says so, and the build's reason is there.
func TestLogsStayInQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		m := daemon(t, dir, nodetest.NewHost(t), func(c *Config) { c.Builder = &talker{} })
		defer func() { _ = m.Close() }()
		const quota = mib
		must(t, second(m.SetQuota(t.Context(), sandbox.Quota{Namespace: sandbox.DefaultNamespace, Storage: quota})))
		for i, kept := range []bool{true, false, false} {
			k := key(fmt.Sprint("t", i))
			made, err := m.ApplyTemplate(t.Context(), k, sandbox.TemplateSpec{Image: "x", MilliCPUs: 1000, Memory: 64 * mib})
			must(t, err)
			synctest.Wait()
			built, err := m.Builds(t.Context(), made)
			if err != nil || len(built) != 1 || built[0].Phase != sandbox.PhaseFailed || !strings.Contains(built[0].Problem, "it does not work") {
				t.Fatalf("%+v, %v", built, err)
			}
			err = m.CopyBuildLog(t.Context(), sandbox.BuildLogRequest{Key: k, Stage: sandbox.AfterReady}, io.Discard)
			if kept != (err == nil) || kept == strings.Contains(built[0].Problem, "its log is not kept") {
				t.Errorf("the log of build %d: %v; the build: %s", i, err, built[0].Problem)
			}
			if !kept && (!sandbox.HasCode(err, sandbox.CodeNotReady) || !strings.Contains(err.Error(), "quota of namespace default")) {
				t.Errorf("%v", err)
			}
			q, err := m.QuotaOf(t.Context(), sandbox.DefaultNamespace)
			must(t, err)
			onDisk := uint64(0)
			files, err := filepath.Glob(filepath.Join(dir, logsDir, "*"))
			must(t, err)
			for _, file := range files {
				info, err := os.Stat(file)
				must(t, err)
				onDisk += uint64(info.Size())
			}
			if q.UsedStorage > quota || q.UsedStorage != onDisk {
				t.Errorf("%d bytes count, %d are on disk, of %d", q.UsedStorage, onDisk, quota)
			}
		}
		for i := range 3 {
			must(t, m.DeleteTemplate(t.Context(), key(fmt.Sprint("t", i))))
		}
		if q, err := m.QuotaOf(t.Context(), sandbox.DefaultNamespace); err != nil || q.UsedStorage != 0 {
			t.Errorf("%d bytes are left (%v)", q.UsedStorage, err)
		}
	})
}
