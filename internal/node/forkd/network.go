package forkd

import (
	"path/filepath"

	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/network/netproc"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/node/netds"
)

const (
	netdsName = "netd"
	// resolvFile is where hosts keep their DNS servers.
	resolvFile = "/etc/resolv.conf"
)

// openNetwork opens the network for the interfaces of sandboxes.
func (d *Daemon) openNetwork() (_ node.Network, err error) {
	settings, err := netds.OpenSettings(d.cfg.NetworkFile, resolvFile)
	if err != nil {
		return nil, err
	}
	if d.routes, err = addresses.OpenRoutes(); err != nil {
		return nil, err
	}
	d.guard = addresses.NewGuard(d.routes, nil)
	settings.Follow(d.guard)
	d.jail, err = netproc.NewJail(jail.Config{AllowUnlimited: d.cfg.Jail.AllowUnlimited, AllowUnjailed: d.cfg.Jail.AllowUnjailed})
	if err != nil {
		return nil, err
	}
	d.netds = netds.New(netds.Config{Dir: filepath.Join(d.cfg.Dir, netdsName), Jail: d.jail, Settings: settings, Log: d.cfg.Log})
	return d.netds, nil
}
