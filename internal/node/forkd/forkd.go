// Package forkd is the daemon of a node. It opens the state folder, an engine
// and the images. It serves their API on a Unix socket and, if configured, on a
// TCP address. docs/design/forkd.md describes all of it.
package forkd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/node/metrics"
	"agentrun.dev/internal/node/netds"
	"agentrun.dev/internal/node/template"
	"agentrun.dev/internal/node/tracing"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
	restserver "agentrun.dev/internal/server/rest"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/peer"
	"agentrun.dev/internal/storage/seal"
)

// Config configures a daemon.
type Config struct {
	// Dir is the state folder; it belongs to one user and one daemon.
	Dir string
	// Images stores the images.
	Images *image.Store
	Pull   image.PullOptions
	// Engine runs the sandboxes.
	Engine pick.Kind
	Jail   microvm.JailPolicy
	// Listen is a TCP address to serve on besides the socket; empty serves only
	// the socket.
	Listen string
	// Advertise is the address by which others reach Listen; empty uses Listen
	// itself.
	Advertise string
	// TLSCert and TLSKey are files for that address; without them the daemon
	// makes its own certificate. InsecureHTTP serves the address without TLS.
	TLSCert, TLSKey string
	InsecureHTTP    bool
	// NodeListen is a TCP address to serve gRPC on besides its socket, to clients with
	// a certificate of the CAs in NodeFiles; empty serves only the socket.
	NodeListen string
	NodeFiles  access.MutualFiles
	// Serves bounds the reads of other nodes from this one.
	Serves peer.Limits
	// Domain is the domain of the host names of ports, PORT-ID.DOMAIN; empty
	// disables such names.
	Domain string
	// AllowOrigins lists origins of pages that may open terminals, besides the
	// daemon's own.
	AllowOrigins []string
	// MetricsListen is a TCP address that answers scrapes of /metrics without
	// authentication; empty disables it.
	MetricsListen string
	// Capacity is how much memory sandboxes may reserve together, in bytes.
	Capacity uint64
	// StorageReserve is how many bytes of the state folder's disk are kept free of data
	// that tenants store; 0 keeps no reserve.
	StorageReserve uint64
	// KeyFile contains the key that seals secrets; empty is a file in the state
	// folder. It is made if it is missing.
	KeyFile string
	// NetworkFile has the settings of the sandboxes' network, in YAML; empty uses the
	// defaults. It is read again when it changes.
	NetworkFile string
	// NodeID is the node's name; if it is empty, one is made up once, and kept.
	NodeID string
	// Codes become parts of the ids of sandboxes that the node makes; zero adds
	// no codes.
	Codes   sandbox.Codes
	Version string
	Log     *slog.Logger
}

// Names in the state folder.
const (
	socketName = "socket"
	keyName    = "secrets.key"
	tlsName    = "tls"
	auditName  = "audit"
	nodeName   = "node.sock"
)

// Socket is the path of the daemon's socket in a state folder.
func Socket(dir string) string { return filepath.Join(dir, socketName) }

// NodeSocket is the path of the socket of the gRPC API for a controller.
func NodeSocket(dir string) string { return filepath.Join(dir, nodeName) }

var (
	_ server.Service   = (*node.Manager)(nil)
	_ server.Snapshots = (*node.Manager)(nil)
)

// Daemon is an open daemon.
type Daemon struct {
	cfg     Config
	engine  engine.Engine
	manager *node.Manager
	netds   *netds.Netds
	jail    *jail.Jail // of the netds
	// guard decides which addresses pulls of namespaces may not reach; it asks
	// routes.
	guard   *addresses.Guard
	routes  *addresses.Routes
	access  *access.Store
	audit   *audit.Log
	metrics *metrics.Metrics
	tracer  *tracing.Tracer // nil if none is configured
	// terminals and contexts are shared by all servers.
	terminals *restserver.Terminals
	contexts  *server.Contexts
	// work is told of the work in sandboxes.
	work sandbox.Observer
	// scraped serves metrics besides the API; it may be nil.
	scraped net.Listener
	servers []*http.Server
	sockets []net.Listener // of the servers, in order
	nodes   []nodeDoor
	ready   server.Readiness
	doors   Doors
}

// Open takes over the state that an earlier daemon has left, and begins to
// listen.
func Open(ctx context.Context, cfg Config) (_ *Daemon, err error) {
	d := &Daemon{cfg: cfg, terminals: restserver.NewTerminals(), contexts: server.NewContexts()}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the state folder: %w", err)
	}
	boot, err := folder.BootID()
	if err != nil {
		return nil, err
	}
	key, err := openKey(cfg)
	if err != nil {
		return nil, err
	}
	d.engine, err = pick.Open(cfg.Engine, pick.Config{
		Resident: layer.ResidentFolder(cfg.Dir), Scratch: filepath.Join(cfg.Dir, "scratch"), Helpers: filepath.Join(cfg.Dir, "helpers"), Jail: cfg.Jail, Key: key,
	})
	if err != nil {
		return nil, err
	}
	d.metrics = metrics.New(cfg.Version, string(cfg.Engine))
	cfg.Pull.Observe = d.metrics.Pulled
	watchers := []sandbox.Observer{d.metrics}
	if tracing.Configured() {
		if d.tracer, err = tracing.Open(ctx, cfg.Version, string(cfg.Engine), cfg.Log); err != nil {
			return nil, err
		}
		watchers = append(watchers, d.tracer)
	}
	d.work = sandbox.Observers(watchers...)
	network, err := d.openNetwork()
	if err != nil {
		return nil, err
	}
	d.manager, err = node.Open(ctx, node.Config{
		Dir: cfg.Dir, Engine: d.engine, Boot: boot, NodeID: cfg.NodeID, Codes: cfg.Codes, Capacity: cfg.Capacity, StorageReserve: cfg.StorageReserve,
		Key: key, Log: cfg.Log,
		Observer: d.work, Network: network, Peers: d.openPeers(), Serves: cfg.Serves,
		Images:  template.Images{Store: cfg.Images},
		Builder: &template.Builder{Engine: d.engine, Images: cfg.Images, Pull: cfg.Pull, Guard: d.guard, PlainRoots: cfg.Engine == pick.GVisor},
	})
	if err != nil {
		return nil, err
	}
	if d.access, err = access.Open(d.manager.Journal()); err != nil {
		return nil, err
	}
	d.audit, err = audit.Open(audit.Config{
		Dir: filepath.Join(cfg.Dir, auditName), Failed: func(err error) { cfg.Log.Error("the audit log", "error", err) },
	})
	if err != nil {
		return nil, err
	}
	d.metrics.Watch(d.manager)
	d.metrics.WatchNetwork(d.netds)
	return d, d.listen(ctx)
}

// openKey opens the key of the secrets. It makes a new key only if no secret is
// sealed yet, because a new key could not open sealed ones.
func openKey(cfg Config) (*seal.Key, error) {
	file := cfg.KeyFile
	if file == "" {
		file = filepath.Join(cfg.Dir, keyName)
	}
	_, err := os.Stat(file)
	if !errors.Is(err, fs.ErrNotExist) {
		return seal.Open(file)
	}
	secrets := node.SecretsFolder(cfg.Dir)
	if _, err := os.Stat(secrets); err == nil {
		return nil, fmt.Errorf("the key of the secrets, %s, is missing, and %s was sealed with it. Put it back; if it is lost, so are the secrets and the hibernated sandboxes that hold them: remove %s to go on without", file, secrets, secrets)
	}
	return seal.OpenOrMake(file)
}

// listen opens the socket and the TCP address. The holder of the journal is the
// folder's only daemon, so an existing socket belongs to a dead one.
func (d *Daemon) listen(ctx context.Context) error {
	l, err := listenUnix(ctx, Socket(d.cfg.Dir))
	if err != nil {
		return err
	}
	d.sockets = append(d.sockets, l)
	if d.cfg.Listen == "" {
		d.serve("")
		return errors.Join(d.listenNode(ctx, ""), d.listenMetrics(ctx))
	}
	if l, err = d.listenTCP(ctx); err != nil {
		return err
	}
	d.sockets = append(d.sockets, l)
	endpoint := d.cfg.Advertise
	if endpoint == "" {
		endpoint = l.Addr().String()
	}
	d.serve(endpoint)
	d.serve(endpoint)
	return errors.Join(d.listenNode(ctx, endpoint), d.listenMetrics(ctx))
}

// listenMetrics opens the address for scrapers.
func (d *Daemon) listenMetrics(ctx context.Context) error {
	if d.cfg.MetricsListen == "" {
		return nil
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", d.cfg.MetricsListen)
	if err != nil {
		return fmt.Errorf("listen on %s for metrics: %w", d.cfg.MetricsListen, err)
	}
	d.sockets, d.scraped = append(d.sockets, l), l
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", d.metrics.Handler())
	d.servers = append(d.servers, restserver.HTTP(mux, d.cfg.Log))
	return nil
}

// listenUnix listens on a socket that only the daemon's user may use.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen: %w", err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w. A socket's path has at most 107 bytes: choose a shorter state folder", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("listen: %w", err), l.Close())
	}
	return l, nil
}

// serve makes the server of the next socket.
func (d *Daemon) serve(endpoint string) {
	watchers := []restserver.Observer{d.metrics}
	if d.tracer != nil {
		watchers = append(watchers, d.tracer)
	}
	h := restserver.New(restserver.Config{
		Config: d.serverConfig(endpoint), Observer: restserver.Observers(watchers...), Metrics: d.metrics.Handler(),
		Domain: d.cfg.Domain, Terminals: d.terminals, AllowOrigins: d.cfg.AllowOrigins,
	})
	d.servers = append(d.servers, restserver.HTTP(h, d.cfg.Log))
}

func (d *Daemon) serverConfig(endpoint string) server.Config {
	return server.Config{
		Service: d.manager, Snapshots: d.manager, Access: d.access, Audit: d.audit, Version: d.cfg.Version, Endpoint: endpoint, Log: d.cfg.Log,
		Work: d.work, Contexts: d.contexts, Readiness: &d.ready,
	}
}

// Addresses returns the addresses on which the daemon serves its API.
func (d *Daemon) Addresses() []net.Addr {
	var out []net.Addr
	for _, l := range d.sockets {
		if l != d.scraped {
			out = append(out, l.Addr())
		}
	}
	return out
}

// Metrics returns the address for scrapers, or nil.
func (d *Daemon) Metrics() net.Addr {
	if d.scraped == nil {
		return nil
	}
	return d.scraped.Addr()
}

// shutdownGrace is how long requests may take to finish when the daemon ends.
const shutdownGrace = 5 * time.Second

// Serve serves until ctx ends, and then lets go of all sandboxes. They keep
// running, and the next daemon finds them.
func (d *Daemon) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, len(d.servers)+len(d.nodes))
	var all sync.WaitGroup
	d.ready.Set(true) // Open has swept
	for _, n := range d.nodes {
		all.Go(func() {
			if err := n.Serve(n.listener); err != nil {
				failed <- fmt.Errorf("serve on %s: %w", n.listener.Addr(), err)
				cancel()
			}
		})
	}
	for i, s := range d.servers {
		all.Go(func() {
			if err := s.Serve(d.sockets[i]); !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("serve on %s: %w", d.sockets[i].Addr(), err)
				cancel()
			}
		})
	}
	<-ctx.Done()
	d.ready.Set(false)
	grace, stop := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
	defer stop()
	for _, n := range d.nodes {
		all.Go(func() { n.Shutdown(grace) })
	}
	for _, s := range d.servers {
		if s.Shutdown(grace) != nil {
			_ = s.Close() // streams go on for as long as there is a daemon
		}
	}
	all.Wait()
	close(failed)
	var errs []error
	for err := range failed {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, d.Close())...)
}

// Close frees the resources of a daemon that will not serve: Serve frees them itself.
func (d *Daemon) Close() error {
	var errs []error
	sockets := d.sockets
	for _, n := range d.nodes {
		n.Stop()
		sockets = append(sockets, n.listener)
	}
	for _, l := range sockets {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if d.audit != nil {
		errs = append(errs, d.audit.Close())
	}
	if d.access != nil {
		d.access.Close()
	}
	if d.manager != nil {
		errs = append(errs, d.manager.Close())
	}
	if d.netds != nil {
		errs = append(errs, d.netds.Close())
	}
	if d.routes != nil { // all pulls have ended
		errs = append(errs, d.routes.Close())
	}
	if d.jail != nil {
		errs = append(errs, d.jail.Close())
	}
	if d.tracer != nil {
		ctx, cancel := context.WithTimeout(context.Background(), shutdownGrace)
		defer cancel()
		if err := d.tracer.Close(ctx); err != nil {
			d.cfg.Log.Warn("end tracing", "error", err) // a collector that does not answer is not an error
		}
	}
	if d.engine != nil {
		errs = append(errs, d.engine.Close())
	}
	return errors.Join(errs...)
}
