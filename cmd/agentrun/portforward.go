package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"agentrun.dev/internal/client"
	"github.com/spf13/cobra"
)

func newPortForwardCommand() *cobra.Command {
	var o daemonOptions
	var address string
	cmd := &cobra.Command{
		Use:   "port-forward SANDBOX [LOCAL:]REMOTE...",
		Short: "Reach ports of a sandbox at ports of this machine",
		Long: `Listen on ports of this machine and connect whoever comes with ports of a sandbox of
the daemon, until Ctrl-C. Without LOCAL the port is the same here as there; :REMOTE
takes one that is free. A program in the sandbox need only listen on its loopback.
Connections keep the sandbox in use, and wake one that sleeps.`,
		Example: `  agentrun port-forward agent-session-1 8080:80
  agentrun port-forward agent-session-1 :5432`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.with(func(c *client.Client) error {
				return forwardPorts(cmd.Context(), c, args[0], address, args[1:], cmd.ErrOrStderr())
			})
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "address of this machine to listen on")
	return cmd
}

// portPair is a port of this machine and a port of the sandbox.
type portPair struct{ local, remote uint16 }

func parsePortPair(s string) (p portPair, err error) {
	local, remote, two := strings.Cut(s, ":")
	if !two {
		remote = local
	}
	if p.remote, err = parsePort(remote); err != nil || p.remote == 0 {
		return p, fmt.Errorf("%q: write LOCAL:REMOTE, with ports from 1 to 65535", s)
	}
	if local == "" {
		return p, nil
	}
	if p.local, err = parsePort(local); err != nil {
		return p, fmt.Errorf("%q: write LOCAL:REMOTE, with ports from 1 to 65535", s)
	}
	return p, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err
}

func forwardPorts(ctx context.Context, c *client.Client, name, address string, pairs []string, stderr io.Writer) error {
	if _, err := c.Sandbox(ctx, name); err != nil { // reported now, and not with the first connection
		return err
	}
	var all sync.WaitGroup
	defer all.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	said := &sync.Mutex{}
	say := func(format string, args ...any) {
		said.Lock()
		defer said.Unlock()
		fmt.Fprintf(stderr, "agentrun: "+format+"\n", args...)
	}
	for _, text := range pairs {
		pair, err := parsePortPair(text)
		if err != nil {
			return err
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(int(pair.local))))
		if err != nil {
			return fmt.Errorf("port-forward: %w", err)
		}
		context.AfterFunc(ctx, func() { _ = l.Close() })
		say("%s is port %d of %s", l.Addr(), pair.remote, name)
		all.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return // the end
				}
				all.Go(func() {
					defer func() { _ = conn.Close() }() // it may be closed already
					if err := c.Tunnel(ctx, name, pair.remote, conn); err != nil && ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
						say("a connection to port %d: %v", pair.remote, err)
					}
				})
			}
		})
	}
	<-ctx.Done()
	return nil
}
