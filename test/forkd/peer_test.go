package forkd

import (
	"errors"
	"io"
	"io/fs"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server/remote"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/pack"
	"agentrun.dev/internal/storage/snapshot"
)

// cluster is some daemons on this machine, and the CA of their certificates.
type cluster struct {
	*testing.T
	ca  *node
	dir string
}

// member is one of its daemons.
type member struct {
	*node
	cluster *cluster
	name    string
	address string
	// controller is the daemon as a controller sees it.
	controller *remote.Service
}

func (c *cluster) issue(role, name string) access.MutualFiles {
	c.Helper()
	args := []string{"cert", "issue", name, "--role", role, "--out", c.dir}
	if role == "node" {
		args = append(args, "--host", "127.0.0.1")
	}
	out, err := c.ca.command(args...).CombinedOutput()
	if err != nil {
		c.Fatalf("%v: %s", err, out)
	}
	_, ca, _ := strings.Cut(strings.TrimSpace(string(out)), "its CA is ")
	return access.MutualFiles{Cert: filepath.Join(c.dir, name+".crt"), Key: filepath.Join(c.dir, name+".key"), CA: ca}
}

// add starts a daemon, which ends with the test.
func (c *cluster) add(name string, flags ...string) *member {
	c.Helper()
	m := &member{node: newNode(c.T), cluster: c, name: name}
	if c.ca == nil {
		c.ca = m.node
	}
	m.start(flags...)
	c.Cleanup(m.down)
	return m
}

// start starts a daemon, or the next one on its folder.
func (m *member) start(flags ...string) {
	c := m.cluster
	c.Helper()
	own, before := c.issue("node", m.name), len(m.Log.String())
	m.up(append(flags, "--node-listen", "127.0.0.1:0", "--node-cert", own.Cert, "--node-key", own.Key, "--node-ca", own.CA)...)
	said := regexp.MustCompile(`serving gRPC on (127\.0\.0\.1:\d+),`).FindStringSubmatch(m.Log.String()[before:])
	if said == nil {
		c.Fatalf("it does not say where: %s", m.Log)
	}
	m.address = said[1]
	conn, err := remote.Dial(remote.Target{Address: m.address, Node: m.name, Files: c.issue("controller", "main")})
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { _ = conn.Close() }) // the daemon has ended before
	m.controller = remote.New(conn)
}

var fetchedKey = sandbox.Key{Namespace: "default", Name: "python"}

// fetch has a daemon fetch what the offer is of.
func (m *member) fetch(spec sandbox.TemplateSpec, o sandbox.Offer, from ...*member) {
	m.t.Helper()
	r := sandbox.FetchRequest{Key: fetchedKey, Spec: spec, Offer: o}
	for _, p := range from {
		r.Peers = append(r.Peers, sandbox.PeerAddress{Address: p.address, Node: p.name})
	}
	if _, err := m.controller.FetchTemplate(m.t.Context(), r); err != nil {
		m.t.Fatal(err)
	}
}

// until waits for the build of a template to be so.
func (m *member) until(is func(sandbox.Build) bool) sandbox.Build {
	m.t.Helper()
	for {
		t, err := m.controller.Template(m.t.Context(), fetchedKey)
		if err != nil {
			m.t.Fatal(err)
		}
		all, err := m.controller.Builds(m.t.Context(), t)
		if err != nil {
			m.t.Fatal(err)
		}
		if len(all) > 0 && is(all[0]) {
			return all[0]
		}
		time.Sleep(20 * time.Millisecond) // the test polls, so that it sees what others see
	}
}

// tried is that an attempt has failed.
func tried(b sandbox.Build) bool {
	return b.Over() || b.Attempts > 0 && b.Phase == sandbox.PhasePending
}

// wantClaimed claims a sandbox, whose interpreter is that of the template, and gives it back.
func (m *member) wantClaimed() {
	m.t.Helper()
	if b := m.until(sandbox.Build.Over); b.Phase != sandbox.PhaseReady {
		m.t.Fatalf("%s: %+v", m.name, b)
	}
	ctx := m.t.Context()
	_, err := m.Client.PutPool(ctx, "pool", rest.PoolSpec{Template: "python", Replicas: 0})
	if err == nil {
		_, err = m.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: "a", Pool: "pool"}, "")
	}
	if err != nil {
		m.t.Fatal(err)
	}
	if r, err := m.Client.RunCode(ctx, "a", rest.CodeRequest{Code: "print(warm + 41)"}); err != nil || r.Stdout != "42\n" {
		m.t.Errorf("%s: %+v, %v", m.name, r, err)
	}
	_, err = m.Client.Kill(ctx, "a")
	if err = errors.Join(err, m.Client.DeletePool(ctx, "pool")); err != nil {
		m.t.Error(err)
	}
}

// fetching is how much of snapshots a daemon has on disk that it has not whole.
func (m *member) fetching() (bytes int64) {
	m.t.Helper()
	err := filepath.WalkDir(filepath.Join(m.State, "forkd", "fetching"), func(path string, d fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && d.Type().IsRegular() && unix.Stat(path, &st) == nil {
			bytes += st.Blocks * 512
		}
		return nil // files that were removed meanwhile do not count
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return bytes
}

// TestFetch: a template that one daemon has built is claimed on other daemons that neither have
// its image nor built it. If a peer dies in the middle, the error names the peer and the
// missing parts, and the parts of another peer complete the fetch. Bytes that have changed on
// the disk of a peer are refused.
func TestFetch(t *testing.T) {
	c := &cluster{T: t, dir: t.TempDir()}
	a, b, d := c.add("n1"), c.add("n2"), c.add("n3")
	a.template(pythonImage(t))
	status, err := a.controller.Node(t.Context())
	if err != nil || len(status.Snapshots) != 1 {
		t.Fatalf("%+v, %v", status, err)
	}
	o, err := a.controller.SnapshotOffer(t.Context(), status.Snapshots[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	template, err := a.controller.Template(t.Context(), fetchedKey)
	if err != nil || template.Revision != o.Revision {
		t.Fatalf("%+v, %v", template, err)
	}
	spec := template.Spec
	d.fetch(spec, o, a)
	d.wantClaimed()
	if got, err := d.controller.Node(t.Context()); err != nil || len(got.Snapshots) != 1 || got.Snapshots[0] != status.Snapshots[0] {
		t.Errorf("%+v is not %+v, %v", got.Snapshots, status.Snapshots, err)
	}

	// A fourth one has it from a registry.
	packs := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer packs.Close()
	host := strings.TrimPrefix(packs.URL, "http://")
	e := c.add("n4", "--plain-http", host)
	r := sandbox.FetchRequest{Key: fetchedKey, Spec: spec, Offer: o, Pack: a.push(host + "/team/python:warm")}
	if _, err := e.controller.FetchTemplate(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	e.wantClaimed()

	// The next daemon of a is slow, and dies when some has come.
	a.down()
	a.start("--peer-rate", "1M")
	b.fetch(spec, o, a)
	const some = 6 << 20
	for b.fetching() < some {
		time.Sleep(20 * time.Millisecond) // no event tells how much is on a disk
	}
	a.Kill()
	broken := b.until(tried)
	if broken.Over() || !strings.Contains(broken.Problem, "parts of") || !strings.Contains(broken.Problem, "are missing: node n1 (127.0.0.1:") {
		t.Errorf("%+v", broken)
	}
	if got, err := b.controller.Node(t.Context()); err != nil || len(got.Snapshots) != 0 {
		t.Errorf("half of it is listed: %+v, %v", got.Snapshots, err)
	}
	// So may the one that fetches.
	b.Kill()
	b.start()
	if had := b.fetching(); had < some {
		t.Errorf("only %d bytes are left", had)
	}
	b.fetch(spec, o, a, d)
	b.wantClaimed()
	for b.fetching() > 0 {
		time.Sleep(20 * time.Millisecond) // likewise
	}

	// d tells the digests of its parts, and then another byte is on its disk.
	for _, fetch := range []bool{true, false} {
		if err := b.Client.DeleteTemplate(t.Context(), "python"); err != nil {
			t.Fatal(err)
		}
		if fetch {
			b.fetch(spec, o, d)
			b.until(sandbox.Build.Over)
		}
	}
	layers, err := filepath.Glob(filepath.Join(d.State, "forkd", "snapshots", "*", "layers", "*"))
	if err != nil || len(layers) == 0 {
		t.Fatal(layers, err)
	}
	for _, path := range layers {
		flip(t, path)
	}
	b.fetch(spec, o, d)
	broken = b.until(tried)
	if !strings.Contains(broken.Problem, "node n3 (127.0.0.1:") || !strings.Contains(broken.Problem, "it is not what its digest says") {
		t.Errorf("%+v", broken)
	}
	a.start()
	b.fetch(spec, o, d, a)
	b.wantClaimed()
	if err := a.Client.DeletePool(t.Context(), "pool"); err != nil {
		t.Error(err)
	}
}

// push pushes the only snapshot of a daemon to a registry.
func (m *member) push(name string) string {
	m.t.Helper()
	dirs, err := filepath.Glob(filepath.Join(m.State, "forkd", "snapshots", "*"))
	if err != nil || len(dirs) != 1 {
		m.t.Fatal(dirs, err)
	}
	snap, err := snapshot.Open(dirs[0])
	if err != nil {
		m.t.Fatal(err)
	}
	defer snap.Close()
	ref, err := image.ParseReference(name)
	if err == nil {
		_, err = pack.Push(m.t.Context(), snap, ref, image.Registries{Hosts: map[string]image.Registry{ref.Registry(): {PlainHTTP: true}}}, pack.PackOptions{})
	}
	if err != nil {
		m.t.Fatal(err)
	}
	return name
}

// flip changes the first byte of a read-only file that is not zero, within its first MiB.
func flip(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0) // as root
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	n, err := f.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	for i := range buf[:n] {
		if buf[i] != 0 {
			if _, err := f.WriteAt([]byte{buf[i] ^ 1}, int64(i)); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("%s begins with zeros", path)
}
