package main

import (
	"errors"
	"os"
	"path/filepath"

	"agentrun.dev/internal/client"
	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/sandbox"
	"github.com/spf13/pflag"
)

// daemonOptions are the flags of commands that speak to the daemon.
type daemonOptions struct {
	namespace string
	server    string
}

func (o *daemonOptions) flags(f *pflag.FlagSet) {
	f.StringVarP(&o.namespace, "namespace", "n", string(sandbox.DefaultNamespace), "namespace of the objects")
	o.serverFlag(f)
}

func (o *daemonOptions) serverFlag(f *pflag.FlagSet) {
	f.StringVar(&o.server, "server", "", "URL of the daemon (default: $"+envServer+", then the configuration file, then this machine's)")
}

// dial makes a client of the daemon.
func (o *daemonOptions) dial() (*client.Client, error) {
	if o.namespace == "" {
		o.namespace = string(sandbox.DefaultNamespace)
	}
	if _, err := sandbox.ParseNamespace(o.namespace); err != nil {
		return nil, err
	}
	at, err := findDaemon(o.server)
	if err != nil {
		return nil, err
	}
	at.Namespace = o.namespace
	return client.New(at.Config)
}

// with runs do with a client.
func (o *daemonOptions) with(do func(*client.Client) error) error {
	c, err := o.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return do(c)
}

// has reports whether a name refers to an object of the daemon. Snapshots and
// sandboxes that commands keep without a daemon come first, unless a flag or the
// environment has set the daemon.
func (o *daemonOptions) has(name string) (bool, error) {
	if _, err := local.ParseName(name); err != nil {
		return false, err
	}
	at, err := findDaemon(o.server)
	if err == nil && at.named {
		return true, nil
	}
	if err != nil && !errors.Is(err, errNoDaemon) {
		return false, err
	}
	dir, folderErr := local.DefaultFolder()
	if folderErr != nil {
		return false, folderErr
	}
	for _, kind := range []string{"snapshots", "sandboxes"} {
		if _, err := os.Stat(filepath.Join(dir, kind, name)); err == nil {
			return false, nil
		}
	}
	return err == nil, nil
}

// choose runs inDaemon if the daemon has the name, and otherwise without.
func (o *daemonOptions) choose(name string, inDaemon, without func() error) error {
	has, err := o.has(name)
	switch {
	case err != nil:
		return err
	case has:
		return inDaemon()
	}
	return without()
}

// each calls do for all names, even if it fails for some.
func each(names []string, do func(string) error) error {
	var errs []error
	for _, n := range names {
		errs = append(errs, do(n))
	}
	return errors.Join(errs...)
}
