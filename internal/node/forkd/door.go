package forkd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"

	"agentrun.dev/internal/access"
	nodeserver "agentrun.dev/internal/server/node"
)

// Doors is the information that people need to connect over TCP.
type Doors struct {
	// FirstKey is the admin's key that was just made. It is stored nowhere
	// else, and empty if there already was a key.
	FirstKey string
	// CAFile and Fingerprint describe the authority that the daemon made
	// itself. They are empty if it was given a certificate, or serves without
	// TLS.
	CAFile, Fingerprint string
	// Insecure says that there is no TLS.
	Insecure bool
}

// Doors describes how to reach the daemon over TCP.
func (d *Daemon) Doors() Doors { return d.doors }

// listenTCP opens the TCP address, with TLS unless the configuration rules that
// out.
func (d *Daemon) listenTCP(ctx context.Context) (_ net.Listener, err error) {
	cfg := d.cfg
	if (cfg.TLSCert == "") != (cfg.TLSKey == "") {
		return nil, errors.New("a TLS certificate needs its key, and a key its certificate: give both or none")
	}
	if cfg.InsecureHTTP && cfg.TLSCert != "" {
		return nil, errors.New("a TLS certificate and no TLS were asked for: leave one out")
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", cfg.Listen, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	settings, err := d.settings(l.Addr())
	if err != nil {
		return nil, err
	}
	// This comes last, because a key that is made must also be shown.
	if d.doors.FirstKey, _, err = d.access.FirstKey(); err != nil {
		return nil, err
	}
	if settings == nil {
		return l, nil
	}
	return tls.NewListener(l, settings), nil
}

// settings returns the settings for TLS, or nil.
func (d *Daemon) settings(addr net.Addr) (*tls.Config, error) {
	switch {
	case d.cfg.InsecureHTTP:
		d.doors.Insecure = true
		return nil, nil
	case d.cfg.TLSCert != "":
		return access.Given(d.cfg.TLSCert, d.cfg.TLSKey, func(err error) { d.cfg.Log.Error("the TLS certificate", "error", err) })
	}
	authority, err := access.OpenAuthority(filepath.Join(d.cfg.Dir, tlsName))
	if err != nil {
		return nil, err
	}
	hosts, err := access.Hosts(addr, d.cfg.Advertise)
	if err != nil {
		return nil, err
	}
	if d.cfg.Domain != "" { // ports of sandboxes have names below it
		hosts = append(hosts, d.cfg.Domain, "*."+d.cfg.Domain)
	}
	d.doors.CAFile, d.doors.Fingerprint = authority.File, authority.Fingerprint()
	return authority.Server(hosts)
}

// nodeDoor is a server of gRPC, and where it listens.
type nodeDoor struct {
	*nodeserver.Server
	listener net.Listener
}

// listenNode opens the socket of gRPC, and its TCP address.
func (d *Daemon) listenNode(ctx context.Context, endpoint string) error {
	l, err := listenUnix(ctx, NodeSocket(d.cfg.Dir))
	if err != nil {
		return err
	}
	d.nodes = append(d.nodes, nodeDoor{nodeserver.New(d.serverConfig(endpoint)), l})
	if d.cfg.NodeListen == "" {
		return nil
	}
	end, err := access.OpenMutual(d.cfg.NodeFiles)
	if err != nil {
		return fmt.Errorf("serve gRPC on %s: %w", d.cfg.NodeListen, err)
	}
	if l, err = new(net.ListenConfig).Listen(ctx, "tcp", d.cfg.NodeListen); err != nil {
		return fmt.Errorf("listen on %s for gRPC: %w", d.cfg.NodeListen, err)
	}
	d.nodes = append(d.nodes, nodeDoor{nodeserver.NewMutual(d.serverConfig(endpoint), end), l})
	return nil
}

// NodeAddress returns the TCP address of gRPC, or nil.
func (d *Daemon) NodeAddress() net.Addr {
	for _, n := range d.nodes {
		if a, ok := n.listener.Addr().(*net.TCPAddr); ok {
			return a
		}
	}
	return nil
}
