package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/peer"
	"agentrun.dev/internal/storage/snapshot"
)

// wires are other nodes, by name, whose managers are in this process.
type wires struct {
	mu    sync.Mutex // protects all following fields
	nodes map[string]*Manager
	// allow is how many parts a node sends until its connection breaks; nil is all.
	allow map[string]*int
	sent  map[string]int
	// flip has a node send other bytes.
	flip map[string]bool
	// pull plays a registry: it makes the snapshot of a pack.
	pull func(dir string, r PullRequest) (*snapshot.Snapshot, error)
}

func newWires() *wires {
	return &wires{nodes: map[string]*Manager{}, allow: map[string]*int{}, sent: map[string]int{}, flip: map[string]bool{}}
}

func (w *wires) Dial(a sandbox.PeerAddress) (Peer, error) { return &wire{w, a.Node}, nil }

func (w *wires) Pull(_ context.Context, _, dir string, r PullRequest) (*snapshot.Snapshot, error) {
	if w.pull == nil {
		return nil, errors.New("no such pack")
	}
	return w.pull(dir, r)
}

// wire is the way to a node.
type wire struct {
	*wires
	name string
}

func (w *wire) Name() string { return w.name }
func (w *wire) Close() error { return nil }

func (w *wire) node() (*Manager, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.nodes[w.name]; m != nil {
		return m, nil
	}
	return nil, errors.New("connection refused")
}

func (w *wire) Digests(ctx context.Context, id snapshot.ID, blob layer.Digest, from uint32) (peer.Digests, error) {
	m, err := w.node()
	if err != nil {
		return nil, err
	}
	page, err := m.SnapshotDigests(ctx, sandbox.SnapshotRead{Snapshot: id.String(), Layer: blob.String()}, from)
	if err != nil {
		return nil, err
	}
	return peer.ParsePage(page)
}

func (w *wire) Read(ctx context.Context, id snapshot.ID, blob layer.Digest, parts []uint32, each func(uint32, []byte) error) error {
	m, err := w.node()
	if err != nil {
		return err
	}
	return m.ReadSnapshot(ctx, sandbox.SnapshotRead{Snapshot: id.String(), Layer: blob.String(), Parts: parts}, func(n uint32, content []byte) error {
		w.mu.Lock()
		left, flip := w.allow[w.name], w.flip[w.name]
		if left != nil {
			if *left == 0 {
				w.mu.Unlock()
				return errors.New("connection reset")
			}
			*left--
		}
		w.sent[w.name]++
		w.mu.Unlock()
		if flip {
			content = bytes.Clone(content)
			content[len(content)/2] ^= 1
		}
		return each(n, content)
	})
}

// images is a builder that knows which images there are.
type images struct {
	builder
	mu      sync.Mutex // protects all following fields
	digests map[string]string
	built   []string
}

func (b *images) ResolveImage(_ context.Context, q ImageQuestion) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.digests[q.Name]
}

func (b *images) Build(ctx context.Context, req BuildRequest) (sandbox.Built, error) {
	built, err := b.builder.Build(ctx, req)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.built = append(b.built, req.Image)
	if built.Image = req.Image; built.Image == "" {
		built.Image = "sha256:whichever"
	}
	return built, err
}

func (b *images) builds() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.built)
}

// fetchNode is a node of a small cluster.
type fetchNode struct {
	*testing.T
	*Manager
	dir     string
	host    *nodetest.Host
	builder *images
	wires   *wires
}

// layerMiB is how large the layer of memory of a template is in these tests.
const layerMiB = 5

func newFetchNode(t *testing.T, w *wires, name string) *fetchNode {
	t.Helper()
	n := &fetchNode{T: t, dir: t.TempDir(), host: nodetest.NewHost(t), wires: w}
	n.builder = &images{builder: builder{pages: fmt.Sprint(layerMiB << 20 / layer.PageSize)}, digests: map[string]string{"python": "sha256:python"}}
	n.open()
	t.Cleanup(func() { _ = n.Manager.Close() })
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes[name] = n.Manager
	return n
}

func (n *fetchNode) open(change ...func(*Config)) {
	n.Helper()
	change = append([]func(*Config){func(c *Config) { c.Builder, c.Peers = n.builder, n.wires }}, change...)
	n.Manager = daemon(n.T, n.dir, n.host, change...)
}

var (
	pyKey  = sandbox.Key{Namespace: "default", Name: "py"}
	pySpec = sandbox.TemplateSpec{Image: "python", MilliCPUs: 1000, Memory: 64 * mib}
)

// until waits for a build of a template.
func (n *fetchNode) until(k sandbox.Key, is func(sandbox.Build) bool) sandbox.Build {
	n.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		t, err := n.Template(n.Context(), k)
		if err != nil {
			n.Fatal(err)
		}
		all, err := n.Builds(n.Context(), t)
		if err != nil {
			n.Fatal(err)
		}
		for _, b := range all {
			if b.Stage == sandbox.AfterReady && is(b) {
				return b
			}
		}
		select {
		case <-tick.C:
		case <-n.Context().Done():
			n.Fatalf("it never was: %+v", all)
		}
	}
}

func over(b sandbox.Build) bool { return b.Over() }
func tried(b sandbox.Build) bool {
	return b.Over() || b.Phase == sandbox.PhasePending && b.Attempts > 0
}

// build applies the template, and returns the offer of its snapshot.
func (n *fetchNode) build() sandbox.Offer {
	n.Helper()
	if _, err := n.ApplyTemplate(n.Context(), pyKey, pySpec); err != nil {
		n.Fatal(err)
	}
	return n.offer(n.until(pyKey, over))
}

func (n *fetchNode) offer(b sandbox.Build) sandbox.Offer {
	n.Helper()
	digest, err := n.digest(b.Snapshot)
	if err != nil {
		n.Fatal(err)
	}
	o, err := n.SnapshotOffer(n.Context(), digest)
	if err != nil {
		n.Fatal(err)
	}
	return o
}

func fetchOf(o sandbox.Offer, peers ...string) sandbox.FetchRequest {
	r := sandbox.FetchRequest{Key: pyKey, Spec: pySpec, Offer: o}
	for _, p := range peers {
		r.Peers = append(r.Peers, sandbox.PeerAddress{Address: p + ":1", Node: p})
	}
	return r
}

// wantFetched claims a sandbox of the fetched snapshot.
func (n *fetchNode) wantFetched(o sandbox.Offer) {
	n.Helper()
	b := n.until(pyKey, over)
	if b.Phase != sandbox.PhaseReady || b.Fetch != nil || n.builder.builds() != 0 {
		n.Fatalf("%+v, %d were built", b, n.builder.builds())
	}
	if got, err := n.digest(b.Snapshot); err != nil || got != o.Digest || b.Revision != o.Revision || b.Env["FROM"] != "image" || b.Image == "" || b.Kept < layerMiB*mib {
		n.Errorf("%s, %v, %+v", got, err, b)
	}
	if _, err := n.ApplyPool(n.Context(), sandbox.Key{Namespace: "default", Name: "pool"}, sandbox.PoolSpec{Template: "py"}); err != nil {
		n.Fatal(err)
	}
	made, _, err := n.Claim(n.Context(), sandbox.ClaimRequest{Key: sandbox.Key{Namespace: "default", Name: "a"}, Spec: sandbox.ClaimSpec{Pool: "pool"}})
	if err != nil || made.State != sandbox.Running {
		n.Errorf("%+v, %v", made, err)
	}
	n.wantNothingLeft()
}

// wantNothingLeft waits until all files of a fetch are removed.
func (n *fetchNode) wantNothingLeft() {
	n.Helper()
	for {
		left, err := os.ReadDir(filepath.Join(n.dir, fetchingDir))
		if err != nil {
			n.Fatal(err)
		}
		if len(left) == 0 {
			return
		}
		select {
		case <-time.After(time.Millisecond):
		case <-n.Context().Done():
			n.Fatalf("left: %v", left)
		}
	}
}

// TestFetchTemplate: a template that one node has built is claimed on another, which builds
// nothing; a second fetch changes nothing, and a template whose layers are here sends none of them.
func TestFetchTemplate(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	applied := sure(b.FetchTemplate(t.Context(), fetchOf(o, "a")))(t)
	if applied.Revision != o.Revision || applied.Image != "sha256:python" {
		t.Errorf("%+v", applied)
	}
	b.wantFetched(o)
	sent := w.sent["a"]
	again := sure(b.FetchTemplate(t.Context(), fetchOf(o, "a")))(t)
	if again.Revision != o.Revision || w.sent["a"] != sent {
		t.Errorf("%+v, %d parts were sent", again, w.sent["a"]-sent)
	}
	if again := sure(b.ApplyTemplate(t.Context(), pyKey, pySpec))(t); again.Revision != o.Revision || b.builder.builds() != 0 {
		t.Errorf("%+v, %d were built", again, b.builder.builds())
	}
	b.wantNothingLeft()
	other := fetchOf(o, "a")
	other.Name = "other"
	sure(b.FetchTemplate(t.Context(), other))(t)
	if got := b.until(other.Key, over); got.Phase != sandbox.PhaseReady || w.sent["a"] != sent+1 { // the state
		t.Errorf("%+v, %d parts were sent", got, w.sent["a"]-sent)
	}
	// b gives the fetched snapshot to others, until it is deleted.
	c := newFetchNode(t, w, "c")
	sure(c.FetchTemplate(t.Context(), fetchOf(o, "b")))(t)
	c.wantFetched(o)
}

// TestFetchGoesOn: if a peer dies in the middle, the build names the missing parts and is
// tried again. The next daemon after a kill continues from the fetched parts. Other peers can
// be named in the meantime.
func TestFetchGoesOn(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	some := 4
	w.allow["a"] = &some
	sure(b.FetchTemplate(t.Context(), fetchOf(o, "a")))(t)
	got := b.until(pyKey, tried)
	if !strings.Contains(got.Problem, "parts of") || !strings.Contains(got.Problem, "are missing: a: ") || !strings.Contains(got.Problem, "connection reset") || got.Over() {
		t.Fatalf("%+v", got)
	}
	if n, err := b.Node(t.Context()); err != nil || len(n.Snapshots) > 0 {
		t.Errorf("half of it is listed: %+v, %v", n.Snapshots, err)
	}
	b.crash()
	b.open()
	w.mu.Lock()
	w.nodes["c"], w.nodes["a"] = a.Manager, nil
	w.mu.Unlock()
	sure(b.FetchTemplate(t.Context(), fetchOf(o, "a", "c")))(t)
	b.wantFetched(o)
	if w.sent["a"]+w.sent["c"] > layerMiB+4 { // state, root, memory, and the torn parts
		t.Errorf("%v parts were sent", w.sent)
	}
}

// TestFetchFails: a fetch that never gets all is over after a while, says why, and leaves nothing;
// the template is built here when it is applied.
func TestFetchFails(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	w.flip["a"] = true
	r := fetchOf(o, "a")
	r.Pack = "registry.example.com/team/py:1"
	sure(b.FetchTemplate(t.Context(), r))(t)
	got := b.until(pyKey, over)
	if got.Phase != sandbox.PhaseFailed || !strings.Contains(got.Problem, "no such pack") {
		t.Errorf("%+v", got)
	}
	var log strings.Builder
	if err := b.CopyBuildLog(t.Context(), sandbox.BuildLogRequest{Key: pyKey, Stage: sandbox.AfterReady}, &log); err != nil || !strings.Contains(log.String(), "it is not what its digest says") {
		t.Errorf("%s, %v", &log, err)
	}
	b.wantNothingLeft()
	applied := sure(b.ApplyTemplate(t.Context(), pyKey, pySpec))(t)
	if got := b.until(pyKey, over); got.Phase != sandbox.PhaseReady || b.builder.builds() != 1 || applied.Revision != o.Revision {
		t.Errorf("%+v, %+v", got, applied)
	}
}

// TestFetchPack: parts that peers do not have come from a registry.
func TestFetchPack(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	dir := a.snapshotDir(a.until(pyKey, over).Snapshot)
	w.pull = func(to string, r PullRequest) (*snapshot.Snapshot, error) {
		from, err := snapshot.Open(dir)
		if err != nil {
			return nil, err
		}
		defer from.Close()
		if err := r.Accept(from.Manifest()); err != nil {
			return nil, err
		}
		return snapshot.Make(to, func(b *snapshot.Builder) (*snapshot.Snapshot, error) {
			for _, ref := range from.Manifest().Layers() {
				if err := b.LinkLayer(ref, from); err != nil {
					return nil, err
				}
			}
			return b.Commit(from.Manifest(), from.State())
		})
	}
	r := fetchOf(o, "gone")
	r.Pack = "registry.example.com/team/py:1"
	sure(b.FetchTemplate(t.Context(), r))(t)
	b.wantFetched(o)
}

// TestFetchRefuses: an offer that does not fit is refused, with the difference.
func TestFetchRefuses(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	for say, change := range map[string]func(*sandbox.FetchRequest){
		"name nodes":              func(r *sandbox.FetchRequest) { r.Peers = nil },
		"not HOST:PORT":           func(r *sandbox.FetchRequest) { r.Peers[0].Address = "a" },
		"name in the certificate": func(r *sandbox.FetchRequest) { r.Peers[0].Node = "" },
		"are more than 16":        func(r *sandbox.FetchRequest) { r.Peers = slices.Repeat(r.Peers, 17) },
		"the offer is of another": func(r *sandbox.FetchRequest) { r.Spec.Init = []string{"true"} },
		"offer.stage":             func(r *sandbox.FetchRequest) { r.Offer.Stage = "" },
		"Fetch the snapshot of":   func(r *sandbox.FetchRequest) { r.Offer.Stage, r.Name = sandbox.AfterInit, "x" },
		"revision is \"x\"":       func(r *sandbox.FetchRequest) { r.Offer.Revision = "x" },
		"the manifest is that of": func(r *sandbox.FetchRequest) { r.Offer.Digest = strings.Repeat("0", 64) },
		"offer.manifest":          func(r *sandbox.FetchRequest) { r.Offer.Manifest = append(r.Offer.Manifest, ' ') },
		"offer.built: it is":      func(r *sandbox.FetchRequest) { r.Offer.Built = []byte(`{"future":1}`) },
		"are not 1 to":            func(r *sandbox.FetchRequest) { r.Offer.Manifest = nil },
		"trust no CA, those":      func(r *sandbox.FetchRequest) { r.Spec.TrustNamespaceCA = true },
		"build other has made it": func(r *sandbox.FetchRequest) { r.Offer = offerBy(t, "other", o) },
		"build lost is lost":      func(r *sandbox.FetchRequest) { r.Offer = offerBy(t, "lost", o) },
		"64 MiB":                  func(r *sandbox.FetchRequest) { r.Spec.Memory = 1 },
		"never travels":           func(r *sandbox.FetchRequest) { r.Offer = offerBy(t, "sealed", o) },
	} {
		b.host.Update("", "lost")
		r := fetchOf(o, "a")
		change(&r)
		if _, err := b.FetchTemplate(t.Context(), r); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%s: %v", say, err)
		}
	}
	if all, err := b.Templates(t.Context(), "default", sandbox.Page{}); err != nil || len(all) > 0 {
		t.Errorf("%+v, %v", all, err)
	}
	b.wantNothingLeft()
	b.cfg.Peers = nil
	if _, err := b.FetchTemplate(t.Context(), fetchOf(o, "a")); !sandbox.HasCode(err, sandbox.CodeUnimplemented) {
		t.Errorf("%v", err)
	}
}

// offerBy is an offer of a snapshot of another AgentRun, or of one that is sealed.
func offerBy(t *testing.T, build string, o sandbox.Offer) sandbox.Offer {
	t.Helper()
	m, err := snapshot.ParseManifest(o.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	if m.Labels = map[string]string{nodetest.BuildKey: build}; build == "sealed" {
		m.Labels, m.Private, m.Format = nil, true, snapshot.FormatPrivate
	}
	if o.Manifest, err = m.Encode(); err != nil {
		t.Fatal(err)
	}
	o.Digest = digestOf(o.Manifest)
	return o
}

// TestFetchQuota: a fetch that the namespace's quota has no room for is not begun, and waits as a
// build does.
func TestFetchQuota(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	o := a.build()
	sure(b.SetQuota(t.Context(), sandbox.Quota{Namespace: "default", Storage: 2 * mib}))(t)
	sure(b.FetchTemplate(t.Context(), fetchOf(o, "a")))(t)
	got := b.until(pyKey, tried)
	if got.Phase != sandbox.PhasePending || !strings.Contains(got.Problem, "the quota of namespace default has no room") || w.sent["a"] != 0 {
		t.Errorf("%+v, %d parts were sent", got, w.sent["a"])
	}
	if q, err := b.QuotaOf(t.Context(), "default"); err != nil || q.UsedStorage != 0 {
		t.Errorf("%+v, %v", q, err)
	}
	full := newFetchNode(t, w, "full")
	full.crash()
	full.open(func(c *Config) { c.StorageReserve = 1 << 60 })
	if _, err := full.FetchTemplate(t.Context(), fetchOf(o, "a")); !sandbox.HasCode(err, sandbox.CodeCapacity) || !strings.Contains(err.Error(), "the disk of the node has no room") {
		t.Errorf("%v", err)
	}
	full.wantNothingLeft()
	// The fetch is no longer wanted.
	if err := b.DeleteTemplate(t.Context(), pyKey); err != nil {
		t.Error(err)
	}
	b.wantNothingLeft()
}

// TestOnlyTemplatesAreOffered: other nodes find neither a checkpoint nor a hibernated sandbox,
// and of templates only snapshots whose digest they know.
func TestOnlyTemplatesAreOffered(t *testing.T) {
	w := newWires()
	a := newFetchNode(t, w, "a")
	o := a.build()
	ctx := t.Context()
	sure(a.ApplyPool(ctx, sandbox.Key{Namespace: "default", Name: "pool"}, sandbox.PoolSpec{Template: "py"}))(t)
	box := sandbox.Key{Namespace: "default", Name: "a"}
	if _, _, err := a.Claim(ctx, sandbox.ClaimRequest{Key: box, Spec: sandbox.ClaimSpec{Pool: "pool"}}); err != nil {
		t.Fatal(err)
	}
	c, _, err := a.Checkpoint(ctx, sandbox.CheckpointRequest{Key: sandbox.Key{Namespace: "default", Name: "c"}, Source: "a"})
	if err != nil {
		t.Fatal(err)
	}
	slept := sure(a.Hibernate(ctx, box))(t)
	for _, dir := range []string{a.checkpointDir(c.ID), a.asleepDir(slept.Asleep)} {
		snap := sure(snapshot.Open(dir))(t)
		id, layers := snap.ID().String(), snap.Manifest().Layers()
		if err := snap.Close(); err != nil {
			t.Error(err)
		}
		if id == o.Digest {
			t.Fatal("it is that of the template")
		}
		if _, err := a.SnapshotOffer(ctx, id); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("an offer of %s: %v", dir, err)
		}
		for _, l := range layers {
			if _, err := a.SnapshotDigests(ctx, sandbox.SnapshotRead{Snapshot: id, Layer: l.Digest.String()}, 0); !sandbox.HasCode(err, sandbox.CodeNotFound) {
				t.Errorf("digests of %s: %v", dir, err)
			}
			never := func(uint32, []byte) error { return errors.New("sent") }
			if err := a.ReadSnapshot(ctx, sandbox.SnapshotRead{Snapshot: id, Layer: l.Digest.String(), Parts: []uint32{0}}, never); !sandbox.HasCode(err, sandbox.CodeNotFound) {
				t.Errorf("parts of %s: %v", dir, err)
			}
		}
	}
	for _, r := range []sandbox.SnapshotRead{
		{Snapshot: "x", Layer: strings.Repeat("0", 64), Parts: []uint32{0}},
		{Snapshot: o.Digest, Layer: "../../journal", Parts: []uint32{0}},
		{Snapshot: o.Digest, Layer: strings.Repeat("0", 64), Parts: []uint32{0}},
	} {
		if err := a.ReadSnapshot(ctx, r, nil); !sandbox.HasCode(err, sandbox.CodeInvalid) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

// TestRevisionHasImage: a template keeps the image that its name led to when it was applied, until
// its spec changes or its build has failed.
func TestRevisionHasImage(t *testing.T) {
	w := newWires()
	a := newFetchNode(t, w, "a")
	ctx := t.Context()
	first := sure(a.ApplyTemplate(ctx, pyKey, pySpec))(t)
	a.until(pyKey, over)
	if first.Image != "sha256:python" || first.Revision == pySpec.RevisionWith("", "") || a.builder.built[0] != "sha256:python" {
		t.Errorf("%+v, built of %v", first, a.builder.built)
	}
	a.builder.mu.Lock()
	a.builder.digests["python"] = "sha256:moved"
	a.builder.mu.Unlock()
	if again := sure(a.ApplyTemplate(ctx, pyKey, pySpec))(t); again.Revision != first.Revision || again.Image != first.Image {
		t.Errorf("%+v", again)
	}
	changed := pySpec
	changed.Init = []string{"true"}
	if got := sure(a.ApplyTemplate(ctx, pyKey, changed))(t); got.Image != "sha256:moved" {
		t.Errorf("%+v", got)
	}
	// Another node has another image under that name: its revision is another one.
	b := newFetchNode(t, w, "b")
	b.builder.digests["python"] = "sha256:other"
	if got := sure(b.ApplyTemplate(ctx, pyKey, pySpec))(t); got.Revision == first.Revision {
		t.Errorf("%+v", got)
	}
	// One that is not found, and fails, is looked up again.
	none := pySpec
	none.Image = "none"
	k := sandbox.Key{Namespace: "default", Name: "none"}
	b.builder.fail = errors.New("no such image")
	if got := sure(b.ApplyTemplate(ctx, k, none))(t); got.Image != "" || got.Revision != none.RevisionWith("", "") {
		t.Errorf("%+v", got)
	}
	b.until(k, over)
	b.builder.mu.Lock()
	b.builder.digests["none"] = "sha256:there"
	b.builder.mu.Unlock()
	if got := sure(b.ApplyTemplate(ctx, k, none))(t); got.Image != "sha256:there" {
		t.Errorf("%+v", got)
	}
}

// TestImageFoundLater: if the image was unknown when a template was applied, the build that
// finds it puts it into the revision, and becomes the build of that revision.
func TestImageFoundLater(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	a.builder.digests = nil // the registry has no answer
	first := sure(a.ApplyTemplate(t.Context(), pyKey, pySpec))(t)
	built := a.until(pyKey, over)
	now := sure(a.Template(t.Context(), pyKey))(t)
	if first.Image != "" || now.Image != "sha256:whichever" || now.Revision != pySpec.RevisionWith("", now.Image) || built.Revision != now.Revision {
		t.Errorf("%+v became %+v with %+v", first, now, built)
	}
	if again := sure(a.ApplyTemplate(t.Context(), pyKey, pySpec))(t); again.Revision != now.Revision || a.builder.builds() != 1 {
		t.Errorf("%+v, built %d times", again, a.builder.builds())
	}
	o := a.offer(built)
	sure(b.FetchTemplate(t.Context(), fetchOf(o, "a")))(t)
	b.wantFetched(o)
	a.crash()
	a.open()
	if again := sure(a.Template(t.Context(), pyKey))(t); again.Revision != now.Revision || a.builder.builds() != 1 {
		t.Errorf("%+v, built %d times", again, a.builder.builds())
	}
}

// TestEarlierRevisions: a template of an earlier program keeps its revision, and its build; it
// is fetched like any.
func TestEarlierRevisions(t *testing.T) {
	w := newWires()
	a, b := newFetchNode(t, w, "a"), newFetchNode(t, w, "b")
	a.crash()
	a.open(func(c *Config) { c.Builder = &a.builder.builder }) // it knows nothing of images
	first := sure(a.ApplyTemplate(t.Context(), pyKey, pySpec))(t)
	o := a.offer(a.until(pyKey, over))
	a.crash()
	a.open()
	w.nodes["a"] = a.Manager
	if again := sure(a.ApplyTemplate(t.Context(), pyKey, pySpec))(t); again.Revision != first.Revision || again.Image != "" || a.builder.builds() != 0 {
		t.Errorf("%+v became %+v", first, again)
	}
	sure(b.FetchTemplate(t.Context(), fetchOf(o, "a")))(t)
	b.wantFetched(o)
}

// TestSweepFetched: a daemon that starts removes fetched files that no build in the
// journal names.
func TestSweepFetched(t *testing.T) {
	w := newWires()
	a := newFetchNode(t, w, "a")
	a.build()
	a.crash()
	for _, name := range []string{strings.Repeat("0", 64) + "/x", "abc.manifest"} {
		path := filepath.Join(a.dir, fetchingDir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil && !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
	a.open()
	a.wantNothingLeft()
}

// TestDrainTellsOfSealed: snapshots that hold secrets stay, and the node reports their
// number.
func TestDrainTellsOfSealed(t *testing.T) {
	onDaemon(t, func(t *testing.T, m *Manager, _ *nodetest.Host) {
		ctx := sandbox.WithPrincipal(t.Context(), "key:x")
		sure(m.ApplySecret(ctx, sandbox.Key{Namespace: "default", Name: "s"}, sandbox.SecretData{"k": []byte("v")}))(t)
		for name, secrets := range map[sandbox.Name][]sandbox.SecretRef{"with": {{Secret: "s", Key: "k", Env: "V"}}, "without": nil} {
			k := sandbox.Key{Namespace: "default", Name: name}
			_, _, err := m.Claim(ctx, sandbox.ClaimRequest{Key: k, Spec: sandbox.ClaimSpec{Pool: "pool", Secrets: secrets}})
			_, _, checkpointErr := m.Checkpoint(ctx, sandbox.CheckpointRequest{Key: sandbox.Key{Namespace: "default", Name: "of-" + name}, Source: name})
			if _, sleepErr := m.Hibernate(ctx, k); errors.Join(err, checkpointErr, sleepErr) != nil {
				t.Fatal(err, checkpointErr, sleepErr)
			}
		}
		n, err := m.Cordon(ctx, true)
		if err != nil || n.Cordon == nil || n.Cordon.Sealed != 2 {
			t.Errorf("%+v, %v", n.Cordon, err)
		}
	})
}

// sure is a value that a call gave, or the end of the test.
func sure[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		must(t, err)
		return v
	}
}
