package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	restserver "agentrun.dev/internal/server/rest"
	"agentrun.dev/internal/storage/image"
)

// ExecConfig configures Exec.
type ExecConfig struct {
	Guest
	// Image is an image in Images. Program is a program in it that does nothing.
	Image   string
	Images  *image.Store
	Program string
	// Count is how often each client runs the program. Clients are numbers of clients
	// at once; each number is one measurement.
	Count   int
	Clients []int
}

// ExecReport is the result of Exec.
type ExecReport struct {
	Engine string     `json:"engine"`
	Rows   []ExecPair `json:"rows"`
}

// ExecPair measures a program that is run by a bare call to the agent and by a
// request to the REST API, in turns.
type ExecPair struct {
	Clients int     `json:"clients"`
	Agent   Summary `json:"agent"`
	REST    Summary `json:"rest"`
}

// Ratio is the time through the API, relative to that of the bare call.
func (p ExecPair) Ratio() float64 { return p.REST.P50 / p.Agent.P50 }

// Exec measures the cost that the API adds to running a program in a sandbox.
func Exec(ctx context.Context, cfg ExecConfig) (_ ExecReport, err error) {
	report := ExecReport{Engine: string(cfg.Engine)}
	n, err := newNode(ctx, nodeConfig{
		Image: cfg.Image, Images: cfg.Images, Memory: cfg.Memory, Folder: cfg.Folder, Engine: cfg.Engine, Jail: cfg.Jail,
	})
	defer func() { err = errors.Join(err, n.close()) }()
	if err != nil {
		return report, fmt.Errorf("prepare the benchmark: %w", err)
	}
	c, err := n.serve(ctx, filepath.Join(cfg.Folder, "socket"))
	if err != nil {
		return report, err
	}
	const name = "measured"
	_, err = n.one(ctx, name, func(u sandbox.Session) error {
		req := guestrpc.ExecRequest{Argv: []string{cfg.Program}, User: u.Record().User, Workdir: u.Record().Workdir}
		agent := func() error {
			st, err := u.Agent().Run(ctx, req, nil, nil, nil)
			return errors.Join(err, exited(st.Code))
		}
		rest := func() error {
			r, err := c.Run(ctx, name, rest.ExecRequest{Argv: []string{cfg.Program}})
			return errors.Join(err, exited(r.ExitCode))
		}
		for _, clients := range cfg.Clients {
			pair := ExecPair{Clients: clients}
			var samples [2][]time.Duration
			const turns = 4 // so that changes of the machine affect both
			for range turns {
				for i, way := range []func() error{agent, rest} {
					took, err := atOnce(clients, max(1, cfg.Count/turns), way)
					if err != nil {
						return err
					}
					samples[i] = append(samples[i], took...)
				}
			}
			pair.Agent, pair.REST = Summarize(samples[0]), Summarize(samples[1])
			report.Rows = append(report.Rows, pair)
		}
		return nil
	})
	return report, err
}

func exited(code int32) error {
	if code != 0 {
		return fmt.Errorf("the program exited with %d", code)
	}
	return nil
}

// atOnce lets each client do something count times, and returns how long each time
// took.
func atOnce(clients, count int, do func() error) ([]time.Duration, error) {
	var all sync.WaitGroup
	took, errs := make([][]time.Duration, clients), make([]error, clients)
	for i := range clients {
		all.Go(func() { took[i], errs[i] = repeat(nil, count, do) })
	}
	all.Wait()
	var flat []time.Duration
	for _, t := range took {
		flat = append(flat, t...)
	}
	return flat, errors.Join(errs...)
}

// serve serves the node's API on a socket, as the daemon does, until the node is
// closed.
func (n *benchNode) serve(ctx context.Context, socket string) (*client.Client, error) {
	c, _, err := n.serveKeys(ctx, socket)
	return c, err
}

// serveKeys is serve, and also returns the keys of the API's users.
func (n *benchNode) serveKeys(ctx context.Context, socket string) (*client.Client, *access.Store, error) {
	cfg, err := n.guard(filepath.Dir(socket))
	if err != nil {
		return nil, nil, err
	}
	h := restserver.New(restserver.Config{Config: cfg})
	s := restserver.HTTP(h, cfg.Log)
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return nil, nil, err
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	n.undo = append(n.undo, func() error {
		err := s.Close()
		<-served
		return err
	})
	c, err := client.New(client.Config{Socket: socket})
	return c, cfg.Access, err
}

// Print writes the report as a table.
func (r ExecReport) Print(w io.Writer) error {
	for _, p := range r.Rows {
		fmt.Fprintf(w, "a program in a sandbox on %s, %d at a time; milliseconds\n", r.Engine, p.Clients)
		err := printTable(w, p.Agent, []row{{"by a bare call to the agent", p.Agent}, {"by the REST API", p.REST}})
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "the API takes %.2f times as long\n\n", p.Ratio())
	}
	return nil
}
