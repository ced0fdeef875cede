package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/node/forkd"
	"agentrun.dev/internal/sandbox"
	restserver "agentrun.dev/internal/server/rest"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/peer"
	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// daemonFolder is the daemon's part of the state folder.
func daemonFolder() (string, error) {
	dir, err := local.DefaultFolder()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "forkd"), nil
}

// upOptions are the flags of agentrun up.
type upOptions struct {
	engine   pick.Kind
	policy   microvm.JailPolicy
	listen   string
	public   string
	tlsCert  string
	tlsKey   string
	insecure bool
	node     string
	nodeTLS  access.MutualFiles
	peerRate cli.ByteSize
	reads    int
	capacity cli.ByteSize
	reserve  cli.ByteSize
	keyFile  string
	verbose  bool
	metrics  string
	domain   string
	origins  []string
	format   string
	network  string
	nodeID   string
	// cluster and code become part of the ids of sandboxes.
	cluster, code string
	// reserveGiven says that reserve is not the default.
	reserveGiven bool
	registryOptions
}

// reserveFlag is the name of the flag of upOptions.reserve.
const reserveFlag = "storage-reserve"

func newUpCommand() *cobra.Command {
	var o upOptions
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the daemon: templates, pools, sandboxes and forks over an API",
		Long: `Start the daemon of this machine, forkd, and stay with it until it is told to end
(Ctrl-C, agentrun down). It serves the API of docs/api.md on a Unix socket in the
state folder, for its own user and root, and with --listen on a TCP address over TLS,
for those who have an API key. The first start with --listen makes one for an admin
and shows it, once; agentrun key makes others. Without --tls-cert the daemon makes its
certificate itself, and says where the file is that clients know it by.

With --node-listen it serves gRPC as well, to controllers, gateways and other nodes: they
show a certificate of a CA in --node-ca that gives them their role. All three files are
read again when they change. agentrun cert issue makes certificates for where no
Kubernetes does.

Sandboxes do not end with it: the next agentrun up finds them as they are.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.reserveGiven = cmd.Flags().Changed(reserveFlag)
			return o.run(cmd.Context(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	cli.EngineFlag(f, &o.engine)
	f.StringVar(&o.listen, "listen", "", "TCP address to serve on as well, such as 127.0.0.1:7070")
	f.StringVar(&o.public, "advertise", "", "address that others reach --listen by (default: that address)")
	f.StringVar(&o.tlsCert, "tls-cert", "", "certificate for --listen, in PEM (default: one that is made)")
	f.StringVar(&o.tlsKey, "tls-key", "", "its key, in PEM")
	f.BoolVar(&o.insecure, "insecure-http", false, "serve --listen without TLS: keys and all else can be read on the way")
	f.StringVar(&o.node, "node-listen", "", "TCP address to serve gRPC on, to those with a certificate, such as 10.0.0.5:7071")
	f.StringVar(&o.nodeTLS.Cert, "node-cert", "", "certificate for --node-listen, in PEM")
	f.StringVar(&o.nodeTLS.Key, "node-key", "", "its key, in PEM")
	f.StringVar(&o.nodeTLS.CA, "node-ca", "", "CAs whose certificates --node-listen takes, in PEM")
	f.Var(&o.peerRate, "peer-rate", "bytes per second that other nodes may read of this node's snapshots, all together, at least 1M (default: no bound)")
	f.IntVar(&o.reads, "peer-reads", peer.DefaultReads, "reads of other nodes that are served at once")
	f.Var(&o.capacity, "capacity", "memory that sandboxes may reserve together (default: four fifths of this machine's)")
	f.Var(&o.reserve, reserveFlag, "room on the state folder's disk that is kept free of what sandboxes and templates store (default: a twentieth of the disk, at most 10G)")
	f.StringVar(&o.keyFile, "secrets-key-file", "", "key that seals secrets on disk, an age identity; made if missing (default: secrets.key in the state folder)")
	f.StringVar(&o.domain, "domain", "", "domain whose host names PORT-ID.DOMAIN lead to ports of sandboxes; its DNS must point here")
	f.StringSliceVar(&o.origins, "allow-origin", nil, "origin whose pages may open terminals, such as https://console.example.com")
	f.StringVar(&o.metrics, "metrics-listen", "", "TCP address that serves /metrics without authentication, for a scraper on a private network")
	f.StringVar(&o.network, "network", "", "YAML file of settings of the sandboxes' network, read again when it changes (default: network.yaml in $XDG_CONFIG_HOME/agentrun, or in /etc/agentrun)")
	f.StringVar(&o.nodeID, "node-id", "", "name of this node, letters, digits and dashes (default: one that is made up once, and kept)")
	f.StringVar(&o.cluster, "cluster-code", "", "code of this node's cluster in the ids of its sandboxes, 1 to 7 of a-z and 0-9; with --node-code")
	f.StringVar(&o.code, "node-code", "", "code of this node in the ids of its sandboxes, 1 to 12 of a-z and 0-9; with --cluster-code")
	f.StringVar(&o.format, "log-format", "json", "form of the log on standard error: json or text")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log every request")
	cli.PolicyFlags(f, &o.policy)
	o.registryOptions.flags(f)
	return cmd
}

// check refuses flags that have no use without others.
func (o *upOptions) check() error {
	if o.listen == "" && (o.public != "" || o.tlsCert != "" || o.tlsKey != "" || o.insecure) {
		return errors.New("--advertise, --tls-cert, --tls-key and --insecure-http are about --listen, which is missing")
	}
	given := 0
	for _, flag := range []string{o.node, o.nodeTLS.Cert, o.nodeTLS.Key, o.nodeTLS.CA} {
		if flag != "" {
			given++
		}
	}
	if given != 0 && given != 4 {
		return errors.New("--node-listen, --node-cert, --node-key and --node-ca need each other: give all four or none")
	}
	if o.peerRate != 0 && o.peerRate < peer.MinRate {
		return fmt.Errorf("--peer-rate: %d bytes per second are too few: a part of a snapshot must come in time, give %d or more", o.peerRate, peer.MinRate)
	}
	if o.reads < 1 || o.peerRate != 0 && uint64(o.reads) > peer.DefaultReads*uint64(o.peerRate)/peer.MinRate {
		return fmt.Errorf("--peer-reads: %d reads at once are not possible: there is at least 1, and with --peer-rate each needs %d bytes per second", o.reads, peer.MinRate/peer.DefaultReads)
	}
	return nil
}

func (o *upOptions) run(ctx context.Context, stderr io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	dir, err := daemonFolder()
	if err != nil {
		return err
	}
	images, err := local.OpenImages()
	if err != nil {
		return err
	}
	registries, err := o.registries()
	if err != nil {
		return err
	}
	network, err := o.networkFile()
	if err != nil {
		return err
	}
	capacity := uint64(o.capacity)
	if capacity == 0 {
		if capacity, err = defaultCapacity(); err != nil {
			return err
		}
	}
	reserve := uint64(o.reserve)
	if !o.reserveGiven {
		if reserve, err = defaultReserve(filepath.Dir(dir)); err != nil {
			return err
		}
	}
	level := slog.LevelWarn
	if o.verbose {
		level = slog.LevelInfo
	}
	log, err := newLog(stderr, o.format, level)
	if err != nil {
		return err
	}
	domain, err := restserver.ParseDomain(o.domain)
	if err != nil {
		return err
	}
	for i, origin := range o.origins {
		if o.origins[i], err = restserver.ParseOrigin(origin); err != nil {
			return err
		}
	}
	if o.nodeID != "" {
		if _, err := sandbox.ParseName(o.nodeID); err != nil {
			return fmt.Errorf("--node-id: %w", err)
		}
	}
	codes, err := sandbox.ParseCodes(o.cluster, o.code)
	if err != nil {
		return fmt.Errorf("--cluster-code and --node-code: %w", err)
	}
	kind, why := pick.Choose(o.engine)
	d, err := forkd.Open(ctx, forkd.Config{
		Dir: dir, Images: images, Pull: image.PullOptions{Registries: registries}, Engine: kind, Jail: o.policy,
		Listen: o.listen, Advertise: o.public, TLSCert: o.tlsCert, TLSKey: o.tlsKey, InsecureHTTP: o.insecure,
		NodeListen: o.node, NodeFiles: o.nodeTLS, Serves: peer.Limits{BytesPerSecond: uint64(o.peerRate), Reads: o.reads}, Capacity: capacity, StorageReserve: reserve, KeyFile: o.keyFile, NetworkFile: network, NodeID: o.nodeID, Codes: codes, Version: version,
		MetricsListen: o.metrics, Domain: domain, AllowOrigins: o.origins, Log: log,
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(stderr, "agentrun: engine %s (%s), %d MiB for sandboxes\n", kind, why, capacity>>20)
	for _, a := range d.Addresses() {
		fmt.Fprintf(stderr, "agentrun: serving on %s\n", a)
	}
	if a := d.NodeAddress(); a != nil {
		fmt.Fprintf(stderr, "agentrun: serving gRPC on %s, to certificates of %s\n", a, o.nodeTLS.CA)
	}
	sayDoors(stderr, d.Doors())
	// Under systemd (Type=notify) the service is started now; without systemd
	// this has no effect.
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		return errors.Join(fmt.Errorf("tell systemd: %w", err), d.Close())
	}
	if a := d.Metrics(); a != nil {
		fmt.Fprintf(stderr, "agentrun: serving metrics on %s, to anybody who reaches it\n", a)
	}
	return d.Serve(ctx)
}

// networkFile is the path of the network's settings. A file that the flag names must
// exist; the default one may be created later.
func (o *upOptions) networkFile() (string, error) {
	if o.network == "" {
		return defaultFile("network.yaml"), nil
	}
	if _, err := os.Stat(o.network); err != nil {
		return "", fmt.Errorf("--network: %w", err)
	}
	return o.network, nil
}

// sayDoors prints the information that clients over TCP need.
func sayDoors(w io.Writer, d forkd.Doors) {
	if d.Insecure {
		fmt.Fprintln(w, "agentrun: WARNING: --insecure-http: whoever is on the way can read API keys and everything else, and use them")
	}
	if d.CAFile != "" {
		fmt.Fprintf(w, "agentrun: clients know this node by %s (%s), SHA-256 %s\n", d.CAFile, envCAFile, d.Fingerprint)
	}
	if d.FirstKey != "" {
		fmt.Fprintf(w, "agentrun: the first API key, of an admin; it is shown once: %s\n", d.FirstKey)
	}
}

// newLog makes the log of a daemon.
func newLog(w io.Writer, format string, level slog.Level) (*slog.Logger, error) {
	o := &slog.HandlerOptions{Level: level}
	switch format {
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	}
	return nil, fmt.Errorf("--log-format %q: write json or text", format)
}

// defaultCapacity leaves a fifth of the machine's memory to other programs.
func defaultCapacity() (uint64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("find out how much memory there is: %w", err)
	}
	return info.Totalram * uint64(info.Unit) / 5 * 4, nil
}

// defaultReserve is a twentieth of the disk of a folder, at most 10 GiB.
func defaultReserve(dir string) (uint64, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 0, fmt.Errorf("open the state folder: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, fmt.Errorf("find out how large the disk of %s is: %w", dir, err)
	}
	return min(fs.Blocks*uint64(fs.Bsize)/20, 10<<30), nil
}

func newDownCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "End the daemon; sandboxes run on",
		Long: `End the daemon of this machine and wait until it has ended. Sandboxes run on, and the
next agentrun up finds them; those that wait in pools end.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return down(cmd.Context()) },
	}
}

func down(ctx context.Context) error {
	dir, err := daemonFolder()
	if err != nil {
		return err
	}
	id, err := daemonProcess(ctx, forkd.Socket(dir))
	if err != nil {
		return fmt.Errorf("find the daemon: %w", err)
	}
	held, err := procid.Adopt(id)
	if err != nil {
		return fmt.Errorf("end the daemon: %w", err)
	}
	if err := unix.Kill(id.PID, unix.SIGTERM); err != nil {
		return errors.Join(fmt.Errorf("end the daemon: %w", err), held.Close())
	}
	ended := make(chan error, 1)
	go func() { ended <- errors.Join(held.Wait(), held.Close()) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return fmt.Errorf("wait for the daemon to end: %w", ctx.Err())
	}
}

// daemonProcess is the process that listens on a socket.
func daemonProcess(ctx context.Context, socket string) (procid.ID, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return procid.ID{}, fmt.Errorf("no daemon is running: agentrun up starts one (%w)", err)
	}
	if err != nil {
		return procid.ID{}, err
	}
	defer func() { _ = conn.Close() }() // only asked for its peer
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return procid.ID{}, err
	}
	var peer *unix.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) {
		peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || peerErr != nil {
		return procid.ID{}, errors.Join(err, peerErr)
	}
	return procid.Of(int(peer.Pid))
}
