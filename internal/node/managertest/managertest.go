// Package managertest opens a manager with the test engine of package nodetest, with
// keys and an audit log, for tests of its servers.
package managertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/node/template"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/seal"
)

// Builder makes templates without an image; their sandboxes work in a folder.
type Builder struct {
	// Workdir is that folder.
	Workdir string
	// Gate holds up builds with an init command.
	Gate chan struct{}
}

// Build implements node.Builder.
func (b *Builder) Build(ctx context.Context, req node.BuildRequest) (sandbox.Built, error) {
	_, _ = io.WriteString(req.Log, "building\n")
	if len(req.Spec.Init) > 0 {
		select {
		case <-b.Gate:
		case <-ctx.Done():
			return sandbox.Built{}, ctx.Err()
		}
		_, _ = io.WriteString(req.Log, "$ "+req.Spec.Init[0]+"\n")
	}
	if req.Spec.Image == "broken" {
		return sandbox.Built{}, errors.New("there is no such image")
	}
	snap, err := nodetest.Capture(req.Dir, map[string]string{"image": req.Spec.Image})
	if err != nil {
		return sandbox.Built{}, err
	}
	return sandbox.Built{Image: "sha256:0", Workdir: b.Workdir, Env: req.Spec.Env}, snap.Close()
}

// Finish implements node.Builder.
func (b *Builder) Finish(context.Context, sandbox.TemplateSpec, sandbox.Built, engine.Sandbox) error {
	return nil
}

// DropImage implements node.Builder.
func (*Builder) DropImage(context.Context, sandbox.Namespace, string) (bool, error) { return true, nil }

// Rehearse implements node.Builder.
func (b *Builder) Rehearse(context.Context, sandbox.TemplateSpec, engine.Sandbox) error { return nil }

// Node is a manager with all that a server needs.
type Node struct {
	T       testing.TB
	Manager *node.Manager
	Builder *Builder
	// Network is the network of its sandboxes.
	Network *Network
	// Workdir is the folder of the host that sandboxes work in.
	Workdir string
	Access  *access.Store
	// Trail is the audit log, in the folder TrailDir.
	Trail    *audit.Log
	TrailDir string
	Log      *slog.Logger
}

// New opens a node, and closes it when the test ends. Its sandboxes run programs of
// the host.
func New(t testing.TB) *Node {
	t.Helper()
	n := &Node{T: t, Workdir: t.TempDir(), TrailDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	n.Builder = &Builder{Workdir: n.Workdir, Gate: make(chan struct{})}
	n.Network = newNetwork()
	host := nodetest.NewHost(t)
	host.Execs = true
	key, err := seal.Generate()
	if err != nil {
		t.Fatal(err)
	}
	images, err := image.OpenStore(filepath.Join(t.TempDir(), "images"))
	if err != nil {
		t.Fatal(err)
	}
	n.Manager, err = node.Open(t.Context(), node.Config{
		Dir: t.TempDir(), Engine: host, Builder: n.Builder, Images: template.Images{Store: images}, Network: n.Network, Capacity: 1 << 40, Boot: "this", Key: key, Log: n.Log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Manager.Close(); err != nil {
			t.Error(err)
		}
	})
	n.Access, n.Trail = guard(t, n.Manager, n.TrailDir)
	return n
}

// guard opens the keys of a manager and an audit log, and closes them when the test ends.
func guard(t testing.TB, m *node.Manager, trailDir string) (*access.Store, *audit.Log) {
	t.Helper()
	keys, err := access.Open(m.Journal())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(keys.Close)
	trail, err := audit.Open(audit.Config{Dir: trailDir, Failed: func(err error) { t.Error(err) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := trail.Close(); err != nil {
			t.Error(err)
		}
	})
	return keys, trail
}

// Config returns the configuration of a server for a manager that the test has
// opened, and the key of an administrator.
func Config(t testing.TB, m *node.Manager) (cfg server.Config, key string) {
	t.Helper()
	keys, trail := guard(t, m, t.TempDir())
	key, _, err := keys.Create(access.KeySpec{Name: "test", Role: access.RoleAdmin})
	if err != nil {
		t.Fatal(err)
	}
	return server.Config{Service: m, Snapshots: m, Access: keys, Audit: trail, Log: slog.New(slog.DiscardHandler)}, key
}

// Config returns the configuration of a server for the node.
func (n *Node) Config() server.Config {
	return server.Config{Service: n.Manager, Snapshots: n.Manager, Access: n.Access, Audit: n.Trail, Version: "test", Log: n.Log}
}

// Events returns the events of the audit log.
func (n *Node) Events() (out []audit.Event) {
	n.T.Helper()
	data, err := os.ReadFile(filepath.Join(n.TrailDir, "audit.log"))
	if err != nil {
		n.T.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		var e audit.Event
		if err := json.Unmarshal(line, &e); err != nil {
			n.T.Fatalf("%s: %v", line, err)
		}
		out = append(out, e)
	}
	return out
}

// Eventually waits for a condition that no event reports to a client.
func (n *Node) Eventually(is func() bool) {
	n.T.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-n.T.Context().Done():
			n.T.Fatal("it never was")
		}
	}
}

// Must returns the value of a call, or ends the test.
func Must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// Auditor is a function that receives the events of an audit log.
type Auditor func(audit.Event) error

// Write implements server.Auditor.
func (f Auditor) Write(e audit.Event) error { return f(e) }

// FullDisk fails to keep any event.
func FullDisk(audit.Event) error { return errors.New("no space left on device") }

// Log is a log that can be read while it is written.
type Log struct {
	mu  sync.Mutex // protects all following fields
	buf bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}
