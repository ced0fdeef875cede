package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
	"agentrun.dev/internal/storage/image"
)

// DataPlaneConfig says what DataPlane measures.
type DataPlaneConfig struct {
	Guest
	// Image is one of Images, which has Python.
	Image  string
	Images *image.Store
	// Count is how often each thing is done each way, Bytes how many are moved at once
	// where throughput is measured, Rounds times.
	Count, Rounds int
	Bytes         int
}

// DataPlaneReport is what it found.
type DataPlaneReport struct {
	Engine string         `json:"engine"`
	Bytes  int            `json:"bytes"`
	Rows   []DataPlaneRow `json:"rows"`
}

// DataPlaneRow is one thing that was done in a sandbox by a request to the REST API and by a
// session over the node's gRPC API, in turns.
type DataPlaneRow struct {
	Name string  `json:"name"`
	REST Summary `json:"rest"`
	GRPC Summary `json:"grpc"`
	// Moves says that it moves Bytes: throughput is what counts.
	Moves bool `json:"moves"`
}

// Ratio is how much longer it takes over gRPC.
func (r DataPlaneRow) Ratio() float64 { return r.GRPC.P50 / r.REST.P50 }

// Goals of the data plane.
const (
	goalDataPlane = 1.3 // of REST, p50
	goalMoved     = 0.7 // of REST's throughput
)

// dataPlane is a sandbox that is reached both ways.
type dataPlane struct {
	name    string
	rest    *client.Client
	gateway server.Config
	port    uint16
}

// way is one thing both ways.
type way struct {
	name       string
	moves      bool
	rest, grpc func() error
}

// DataPlane measures what is done in a sandbox through the gRPC API beside the REST API,
// both on Unix sockets.
func DataPlane(ctx context.Context, cfg DataPlaneConfig) (_ DataPlaneReport, err error) {
	report := DataPlaneReport{Engine: string(cfg.Engine), Bytes: cfg.Bytes}
	n, err := newNode(ctx, nodeConfig{
		Image: cfg.Image, Images: cfg.Images, Memory: cfg.Memory, Folder: cfg.Folder, Engine: cfg.Engine, Jail: cfg.Jail,
	})
	defer func() { err = errors.Join(err, n.close()) }()
	if err != nil {
		return report, fmt.Errorf("prepare the benchmark: %w", err)
	}
	n.folder = filepath.Join(cfg.Folder, "grpc")
	services, err := n.serveNode(ctx, 1)
	if err != nil {
		return report, err
	}
	d := &dataPlane{name: "measured", gateway: server.Config{Service: services[0]}.WithDefaults()}
	if d.rest, err = n.serve(ctx, filepath.Join(cfg.Folder, "socket")); err != nil {
		return report, err
	}
	_, err = n.one(ctx, d.name, func(u sandbox.Session) error {
		if err := d.listen(ctx, u); err != nil {
			return err
		}
		for _, w := range d.ways(ctx, cfg.Bytes) {
			row, err := w.measure(cfg)
			if err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			report.Rows = append(report.Rows, row)
		}
		return nil
	})
	return report, err
}

// measure has both ways take turns.
func (w way) measure(cfg DataPlaneConfig) (DataPlaneRow, error) {
	rounds, each := 4, max(1, cfg.Count/4)
	if w.moves {
		rounds, each = cfg.Rounds, 1
	}
	var samples [2][]time.Duration
	for range rounds {
		for i, do := range []func() error{w.rest, w.grpc} {
			took, err := repeat(nil, each, do)
			if err != nil {
				return DataPlaneRow{}, err
			}
			samples[i] = append(samples[i], took...)
		}
	}
	return DataPlaneRow{Name: w.name, REST: Summarize(samples[0]), GRPC: Summarize(samples[1]), Moves: w.moves}, nil
}

// echoServer says on which port it listens, and sends back what it gets.
const echoServer = `
import socket, threading
def serve(c):
    while True:
        b = c.recv(65536)
        if not b:
            break
        c.sendall(b)
    c.close()
s = socket.socket()
s.bind(("127.0.0.1", 0))
s.listen(64)
print(s.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(s.accept()[0],), daemon=True).start()
`

// listen starts a server in the sandbox.
func (d *dataPlane) listen(ctx context.Context, u sandbox.Session) error {
	x, err := u.Agent().Exec(ctx, guestrpc.ExecRequest{Argv: []string{"python3", "-c", echoServer}})
	if err != nil {
		return err
	}
	_, err = fmt.Fscan(x.Stdout(), &d.port)
	return err
}

// use does something in a session, as a gateway does for each request.
func (d *dataPlane) use(ctx context.Context, do func(*server.Session) error) error {
	u, err := d.gateway.Use(ctx, benchKey(d.name))
	if err != nil {
		return err
	}
	defer u.Close()
	return do(u)
}

func (d *dataPlane) ways(ctx context.Context, size int) []way {
	small, large := bytes.Repeat([]byte("x"), 1<<10), bytes.Repeat([]byte("0123456789abcdef"), size/16)
	return []way{
		{"run a program", false, func() error {
			r, err := d.rest.Run(ctx, d.name, rest.ExecRequest{Argv: []string{"true"}})
			return errors.Join(err, exited(r.ExitCode))
		}, func() error {
			return d.use(ctx, func(u *server.Session) error {
				x, err := u.Exec(ctx, guestrpc.ExecRequest{Argv: []string{"true"}})
				if err != nil {
					return err
				}
				st, err := x.Copy(nil, io.Discard, io.Discard)
				return errors.Join(err, exited(st.Code))
			})
		}},
		{"run code", false, func() error {
			_, err := d.rest.RunCode(ctx, d.name, rest.CodeRequest{Code: "1"})
			return err
		}, func() error { return d.use(ctx, func(u *server.Session) error { return runOne(ctx, u) }) }},
		{"write a file of 1 KiB", false, d.writeREST(ctx, small), d.writeGRPC(ctx, small)},
		{"read a file of 1 KiB", false, d.readREST(ctx, small), d.readGRPC(ctx, small)},
		{"connect to a port, and back", false, d.echoREST(ctx, small), d.echoGRPC(ctx, small)},
		{"write a file", true, d.writeREST(ctx, large), d.writeGRPC(ctx, large)},
		{"read a file", true, d.readREST(ctx, large), d.readGRPC(ctx, large)},
		{"through a port, and back", true, d.echoREST(ctx, large), d.echoGRPC(ctx, large)},
	}
}

// runOne runs code in the default context.
func runOne(ctx context.Context, u *server.Session) error {
	in, err := u.DefaultContext(ctx, "")
	if err != nil {
		return err
	}
	x, err := u.Agent().StartCode(ctx, guestrpc.CodeRunRequest{Context: in, Source: "1"})
	if err != nil {
		return err
	}
	_, err = x.Copy(io.Discard, io.Discard, func(guestrpc.CodeEvent) error { return nil })
	return err
}

// path is where a file of the benchmark is.
func path(content []byte) string { return fmt.Sprintf("/tmp/bench-%d", len(content)) }

func (d *dataPlane) writeREST(ctx context.Context, content []byte) func() error {
	return func() error {
		_, err := d.rest.WriteFile(ctx, d.name, path(content), "", bytes.NewReader(content))
		return err
	}
}

func (d *dataPlane) writeGRPC(ctx context.Context, content []byte) func() error {
	return func() error {
		return d.use(ctx, func(u *server.Session) error {
			_, err := u.Agent().WriteFile(ctx, guestrpc.WriteRequest{FileScope: u.Scope(), Path: path(content), Atomic: true, Perm: 0o644}, bytes.NewReader(content))
			return err
		})
	}
}

func (d *dataPlane) readREST(ctx context.Context, content []byte) func() error {
	return func() error {
		var n counter
		err := d.rest.ReadFile(ctx, d.name, path(content), &n)
		return errors.Join(err, n.want(len(content)))
	}
}

func (d *dataPlane) readGRPC(ctx context.Context, content []byte) func() error {
	return func() error {
		return d.use(ctx, func(u *server.Session) error {
			r, err := u.Agent().OpenRead(ctx, guestrpc.ReadRequest{FileScope: u.Scope(), Path: path(content)})
			if err != nil {
				return err
			}
			defer r.Close()
			var n counter
			_, err = io.CopyBuffer(&n, struct{ io.Reader }{r}, make([]byte, guestrpc.MaxPayload))
			return errors.Join(err, n.want(len(content)))
		})
	}
}

func (d *dataPlane) echoREST(ctx context.Context, content []byte) func() error {
	return func() error {
		here, there := net.Pipe()
		ended := make(chan error, 1)
		go func() { ended <- d.rest.Tunnel(ctx, d.name, d.port, there) }()
		err := passBack(here, content)
		_ = here.Close() // ends the tunnel
		<-ended
		return err
	}
}

func (d *dataPlane) echoGRPC(ctx context.Context, content []byte) func() error {
	return func() error {
		return d.use(ctx, func(u *server.Session) error {
			conn, err := u.Connect(ctx, d.port)
			if err != nil {
				return err
			}
			return errors.Join(passBack(conn, content), conn.Close())
		})
	}
}

// passBack sends and gets back.
func passBack(conn io.ReadWriter, content []byte) error {
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(content)
		sent <- err
	}()
	var n counter
	_, err := io.CopyBuffer(&n, io.LimitReader(conn, int64(len(content))), make([]byte, guestrpc.MaxPayload))
	return errors.Join(err, n.want(len(content)), <-sent)
}

// counter counts what is written to it.
type counter int

func (n *counter) Write(p []byte) (int, error) {
	*n += counter(len(p))
	return len(p), nil
}

func (n *counter) want(size int) error {
	if int(*n) != size {
		return fmt.Errorf("%d bytes came, not %d", *n, size)
	}
	return nil
}

// Print writes the report as a table.
func (r DataPlaneReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "in a sandbox on %s; milliseconds\n", r.Engine)
	for _, one := range r.Rows {
		fmt.Fprintf(w, "\n%s\n", one.Name)
		if err := printTable(w, one.REST, []row{{"by the REST API", one.REST}, {"by the gRPC API", one.GRPC}}); err != nil {
			return err
		}
		if one.Moves {
			mb := float64(r.Bytes) / 1e3
			fmt.Fprintf(w, "%.0f MB/s and %.0f MB/s: gRPC has %.2f of REST's throughput (goal %.1f)\n", mb/one.REST.P50, mb/one.GRPC.P50, 1/one.Ratio(), goalMoved)
			continue
		}
		fmt.Fprintf(w, "gRPC takes %.2f times as long at p50 (goal %.1f)\n", one.Ratio(), goalDataPlane)
	}
	return nil
}
