package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"agentrun.dev/internal/client"
	"agentrun.dev/internal/forkd"
	"agentrun.dev/internal/local"
	"agentrun.dev/internal/sandbox"
	"github.com/spf13/pflag"
)

// Where a daemon is that is not the one of this machine's state folder.
const (
	envURL   = "AGENTRUN_URL"
	envToken = "AGENTRUN_TOKEN"
)

// daemonOptions are the flags of commands that speak to the daemon.
type daemonOptions struct{ namespace string }

func (o *daemonOptions) flags(f *pflag.FlagSet) {
	f.StringVarP(&o.namespace, "namespace", "n", string(sandbox.DefaultNamespace), "namespace of the objects")
}

// dial makes a client of the daemon: that of $AGENTRUN_URL, or the local one.
func (o *daemonOptions) dial() (*client.Client, error) {
	if o.namespace == "" {
		o.namespace = string(sandbox.DefaultNamespace)
	}
	if _, err := sandbox.ParseNamespace(o.namespace); err != nil {
		return nil, err
	}
	if url := os.Getenv(envURL); url != "" {
		return client.New(client.Config{URL: url, Token: os.Getenv(envToken), Namespace: o.namespace})
	}
	dir, err := daemonFolder()
	if err != nil {
		return nil, err
	}
	socket := forkd.Socket(dir)
	if _, err := os.Stat(socket); err != nil {
		return nil, fmt.Errorf("no daemon is running: agentrun up starts one, or set %s (%w)", envURL, err)
	}
	return client.New(client.Config{Socket: socket, Namespace: o.namespace})
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

// daemonHas reports whether a name is the daemon's rather than one of the
// snapshots and sandboxes that commands keep without a daemon. Those go before.
func daemonHas(name string) (bool, error) {
	if _, err := local.ParseName(name); err != nil {
		return false, err
	}
	if os.Getenv(envURL) != "" {
		return true, nil
	}
	dir, err := local.DefaultFolder()
	if err != nil {
		return false, err
	}
	for _, kind := range []string{"snapshots", "sandboxes"} {
		if _, err := os.Stat(filepath.Join(dir, kind, name)); err == nil {
			return false, nil
		}
	}
	_, err = os.Stat(forkd.Socket(filepath.Join(dir, "forkd")))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// choose runs what is for the daemon or what is without one, whoever has the
// name.
func choose(name string, inDaemon, without func() error) error {
	has, err := daemonHas(name)
	switch {
	case err != nil:
		return err
	case has:
		return inDaemon()
	}
	return without()
}

// each does something for all names, whatever came of the others.
func each(names []string, do func(string) error) error {
	var errs []error
	for _, n := range names {
		errs = append(errs, do(n))
	}
	return errors.Join(errs...)
}
