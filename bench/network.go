package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/netproc"
	"agentrun.dev/internal/node"
)

// NetworkConfig configures Network.
type NetworkConfig struct {
	Guest
	// Connections are numbers of connections at once. Each is measured up and down,
	// Rounds times, alternating with plain loopback, for For each time.
	Connections []int
	Rounds      int
	For         time.Duration
	// Count is how many round trips are measured, and how many connections one after
	// the other, each way.
	Count int
	// Wires is how many idle wires are attached to another netd; 0 leaves this
	// measurement out.
	Wires int
}

// NetworkReport is the result of Network.
type NetworkReport struct {
	Engine string `json:"engine"`
	Memory uint64 `json:"memory_bytes"`
	VCPUs  int    `json:"vcpus"`
	Rounds int    `json:"rounds"`
	// For is the length of each transfer.
	For        float64      `json:"seconds"`
	Throughput []Throughput `json:"throughput"`
	// RoundTrip is the round trip of one byte. Connect is the time of connect(2). By
	// its end netd has connected to the server.
	RoundTrip LoadPair `json:"round_trip"`
	Connect   LoadPair `json:"connect"`
	// Idle measures idle wires; nil if no wires were attached.
	Idle *IdleWires `json:"idle_wires,omitempty"`
	// Noisy says that plain loopback varied too much for the ratios to be meaningful.
	Noisy bool `json:"noisy"`
}

// LoadPair is one measurement over plain loopback and from a sandbox.
type LoadPair struct {
	Loopback Summary `json:"loopback"`
	Sandbox  Summary `json:"sandbox"`
}

// Throughput is the throughput in one direction.
type Throughput struct {
	// Direction is up, from the sandbox, or down.
	Direction   string `json:"direction"`
	Connections int    `json:"connections"`
	// Loopback and Sandbox are in 10⁶ bytes per second. Ratio is the sandbox's rate
	// relative to the loopback's rate measured right before.
	Loopback Spread `json:"loopback_mb_s"`
	Sandbox  Spread `json:"sandbox_mb_s"`
	Ratio    Spread `json:"ratio"`
	// CPU is the processor time of both ends of plain loopback together. Inside is
	// that of all the sandbox's processes, including the program that sends or
	// receives. Netd and Server are those of the two processes, and Both is that of
	// sandbox and netd together. All are processor seconds per 10⁹ bytes.
	CPU    Spread `json:"loopback_cpu_s_gb"`
	Inside Spread `json:"sandbox_cpu_s_gb"`
	Netd   Spread `json:"netd_cpu_s_gb"`
	Both   Spread `json:"sandbox_and_netd_cpu_s_gb"`
	Server Spread `json:"server_cpu_s_gb"`
	// Frame is the average size of a frame in this direction, in bytes.
	Frame Spread `json:"frame_bytes"`
}

// Network measures TCP from a sandbox through a netd, both in their jails, to a
// server on the loopback, beside plain loopback. It must be called in a network of
// InOwnNetwork.
func Network(ctx context.Context, cfg NetworkConfig) (_ NetworkReport, err error) {
	report := NetworkReport{
		Engine: string(cfg.engine()), Memory: cfg.Memory, VCPUs: cfg.VCPUs, Rounds: cfg.Rounds, For: cfg.For.Seconds(),
	}
	b := &networkBench{cfg: cfg}
	defer func() { err = errors.Join(err, undoAll(b.undo)) }()
	if err := b.open(ctx); err != nil {
		return report, fmt.Errorf("prepare the benchmark: %w", err)
	}
	if err := b.latencies(ctx, &report); err != nil {
		return report, err
	}
	for _, n := range cfg.Connections {
		for _, direction := range []string{loadUp, loadDown} {
			t, err := b.throughput(ctx, direction, n)
			if err != nil {
				return report, err
			}
			report.Throughput = append(report.Throughput, t)
			report.Noisy = report.Noisy || t.Loopback.P50 > noisyRatio*t.Loopback.Min
		}
	}
	if cfg.Wires > 0 {
		report.Idle, err = b.idleWires(ctx)
	}
	return report, err
}

// networkBench is a server, a netd, and a sandbox that is connected to the server.
type networkBench struct {
	cfg     NetworkConfig
	server  *loadServer
	netd    *netproc.Process
	client  *netctl.Client
	sandbox engine.Sandbox
	helper  int // the process of the sandbox, or the one that has started all its processes
	undo    []func() error
}

// measuredWire is the id of the sandbox's wire.
const measuredWire netctl.ID = "measured"

// programInside is the path of this program in the sandbox.
const programInside = "/tmp/bench"

func (b *networkBench) open(ctx context.Context) (err error) {
	if err := bringUp(); err != nil {
		return err
	}
	if b.server, err = newLoadServer(ctx, serverAddress+":0"); err != nil {
		return err
	}
	b.undo = append(b.undo, b.server.close)
	if b.netd, b.client, err = b.startNetd(ctx, "netd"); err != nil {
		return err
	}
	if err := b.boot(ctx); err != nil {
		return err
	}
	wire, err := b.sandbox.Wire()
	if err != nil {
		return err
	}
	err = b.client.Attach(ctx, wireOf(measuredWire), wire)
	return errors.Join(err, wire.Close())
}

// startNetd starts a netd in a jail, and connects to it.
func (b *networkBench) startNetd(ctx context.Context, name string) (*netproc.Process, *netctl.Client, error) {
	j, err := netproc.NewJail(jail.Config{AllowUnlimited: b.cfg.Jail.AllowUnlimited, AllowUnjailed: b.cfg.Jail.AllowUnjailed})
	if err != nil {
		return nil, nil, err
	}
	b.undo = append(b.undo, j.Close)
	p, err := netproc.Start(ctx, netproc.Config{Folder: filepath.Join(b.cfg.Folder, name), Jail: j})
	if err != nil {
		return nil, nil, err
	}
	b.undo = append(b.undo, func() error { return p.Kill(context.WithoutCancel(ctx)) })
	c, err := p.Dial(ctx)
	if err == nil {
		b.undo = append(b.undo, c.Close)
	}
	return p, c, err
}

// boot starts the sandbox, and copies this program into it.
func (b *networkBench) boot(ctx context.Context) (err error) {
	resident, err := os.MkdirTemp("/dev/shm", "agentrun-bench-")
	if err != nil {
		return err
	}
	b.undo = append(b.undo, func() error { return os.RemoveAll(resident) })
	e, err := pick.Open(b.cfg.engine(), pick.Config{
		Resident: resident, Scratch: filepath.Join(b.cfg.Folder, "scratch"), Jail: b.cfg.Jail,
	})
	if err != nil {
		return err
	}
	b.undo = append(b.undo, e.Close)
	root, err := os.Open(b.cfg.Root)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // only read
	b.sandbox, err = e.Boot(ctx, engine.Spec{Root: root, Memory: b.cfg.Memory, VCPUs: b.cfg.VCPUs, Network: node.Interface()})
	if err != nil {
		return err
	}
	b.undo = append(b.undo, b.sandbox.Close)
	id, err := b.cfg.identify(b.sandbox)
	if err != nil {
		return err
	}
	b.helper = id.PID
	program, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer func() { _ = program.Close() }() // only read
	_, err = b.sandbox.Agent().WriteFile(ctx, guestrpc.WriteRequest{Path: programInside, Perm: 0o755}, program)
	return err
}

// wireOf describes the wire of a sandbox that reaches only the server.
func wireOf(id netctl.ID) netctl.Wire {
	n := node.Interface()
	return netctl.Wire{
		ID: id, MAC: n.MAC, GatewayMAC: node.GatewayMAC, MTU: n.MTU,
		Address: n.Address.Addr(), Gateway: n.Gateway, Address6: n.Address6.Addr(), Gateway6: n.Gateway6,
		Rules: netctl.Rules{Policies: `[{"egress": "deny", "allow": ["` + serverAddress + `/32"]}]`},
	}
}

// latencies measures round trips and connections, alternating.
func (b *networkBench) latencies(ctx context.Context, report *NetworkReport) error {
	for _, m := range []struct {
		what string
		to   *LoadPair
	}{{loadEcho, &report.RoundTrip}, {loadConnect, &report.Connect}} {
		var samples [2][]time.Duration
		const turns = 4 // so that changes of the machine affect both
		for range turns {
			for i, run := range []runLoad{b.outside, b.inside} {
				r, err := run(ctx, load{What: m.what, Count: max(1, b.cfg.Count/turns)}, func() error { return nil })
				if err != nil {
					return err
				}
				samples[i] = append(samples[i], r.Samples...)
			}
		}
		*m.to = LoadPair{Summarize(samples[0]), Summarize(samples[1])}
	}
	return nil
}

// throughput measures one direction.
func (b *networkBench) throughput(ctx context.Context, direction string, connections int) (t Throughput, err error) {
	t = Throughput{Direction: direction, Connections: connections}
	l := load{What: direction, Connections: connections, For: b.cfg.For}
	var loopback, sandbox, ratio, cpu, inside, netd, both, server, frame []float64
	for range b.cfg.Rounds {
		floor, used, err := b.timed(ctx, b.outside, l)
		if err != nil {
			return t, err
		}
		loopback, cpu = append(loopback, floor), append(cpu, used.client+used.server)
		before, err := b.counters(ctx)
		if err != nil {
			return t, err
		}
		through, used, err := b.timed(ctx, b.inside, l)
		if err != nil {
			return t, err
		}
		after, err := b.counters(ctx)
		if err != nil {
			return t, err
		}
		frame = append(frame, frameSize(direction, before, after))
		sandbox, ratio = append(sandbox, through), append(ratio, through/floor)
		inside, netd, both = append(inside, used.sandbox), append(netd, used.netd), append(both, used.sandbox+used.netd)
		server = append(server, used.server)
	}
	t.Loopback, t.Sandbox, t.Ratio = SpreadOf(loopback), SpreadOf(sandbox), SpreadOf(ratio)
	t.CPU, t.Server, t.Frame = SpreadOf(cpu), SpreadOf(server), SpreadOf(frame)
	t.Inside, t.Netd, t.Both = SpreadOf(inside), SpreadOf(netd), SpreadOf(both)
	return t, nil
}

// counters returns the counters of the sandbox's wire.
func (b *networkBench) counters(ctx context.Context) (netctl.Counters, error) {
	all, err := b.client.List(ctx)
	if err != nil {
		return netctl.Counters{}, err
	}
	for _, w := range all {
		if w.ID == measuredWire {
			return w.Counters, nil
		}
	}
	return netctl.Counters{}, errors.New("netd has lost the sandbox's wire")
}

// frameSize is the mean size of frames between two readings.
func frameSize(direction string, before, after netctl.Counters) float64 {
	frames, bytes := after.FramesIn-before.FramesIn, after.BytesIn-before.BytesIn
	if direction == loadDown {
		frames, bytes = after.FramesOut-before.FramesOut, after.BytesOut-before.BytesOut
	}
	return float64(bytes) / float64(max(frames, 1))
}

// cpuUse is the processor time of the processes of a transfer, in seconds per 10⁹
// bytes.
type cpuUse struct{ client, server, sandbox, netd float64 }

// timed runs a load and returns its rate in 10⁶ bytes per second, and the processor
// time that it used.
func (b *networkBench) timed(ctx context.Context, run runLoad, l load) (rate float64, used cpuUse, err error) {
	read := func() (server, inside, netd time.Duration, err error) {
		server = ownCPU()
		if inside, err = familyCPU(b.helper); err == nil {
			netd, err = familyCPU(b.netd.PID())
		}
		return server, inside, netd, err
	}
	var server, inside, netd time.Duration
	r, err := run(ctx, l, func() (err error) {
		server, inside, netd, err = read()
		return err
	})
	if err != nil {
		return 0, used, err
	}
	if r.Bytes == 0 || r.Took <= 0 {
		return 0, used, fmt.Errorf("%s with %d connections: nothing has arrived", l.What, l.Connections)
	}
	serverNow, insideNow, netdNow, err := read()
	perGB := func(d time.Duration) float64 { return d.Seconds() / (float64(r.Bytes) / 1e9) }
	return float64(r.Bytes) / 1e6 / r.Took.Seconds(), cpuUse{
		client: perGB(r.CPU), server: perGB(serverNow - server), sandbox: perGB(insideNow - inside), netd: perGB(netdNow - netd),
	}, err
}

// runLoad lets a client run a load. begun is called once its connections are open.
type runLoad func(ctx context.Context, l load, begun func() error) (loaded, error)

func (b *networkBench) argument(l load) (string, error) {
	l.Server = b.server.address()
	a, err := json.Marshal(l)
	return string(a), err
}

// outside runs the client as a process of the host.
func (b *networkBench) outside(ctx context.Context, l load, begun func() error) (r loaded, err error) {
	a, err := b.argument(l)
	if err != nil {
		return r, err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", LoadCommand, a)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return r, err
	}
	if err := cmd.Start(); err != nil {
		return r, err
	}
	r, err = readLoaded(out, begun)
	return r, errors.Join(err, cmd.Wait())
}

// inside runs the client in the sandbox.
func (b *networkBench) inside(ctx context.Context, l load, begun func() error) (r loaded, err error) {
	a, err := b.argument(l)
	if err != nil {
		return r, err
	}
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		status, err := b.sandbox.Agent().Run(ctx, guestrpc.ExecRequest{Argv: []string{programInside, LoadCommand, a}}, nil, in, os.Stderr)
		if err == nil {
			err = exited(status.Code)
		}
		_ = in.CloseWithError(err) // it always returns nil
		ended <- err
	}()
	r, err = readLoaded(out, begun)
	_ = out.CloseWithError(errors.New("nobody listens any more")) // it always returns nil
	return r, errors.Join(err, <-ended)
}

// readLoaded reads the messages of a client, to their end.
func readLoaded(from io.Reader, begun func() error) (r loaded, err error) {
	lines := bufio.NewReader(from)
	line, err := lines.ReadString('\n')
	if err != nil {
		return r, fmt.Errorf("wait for the client: %w", err)
	}
	if line == loadBegins+"\n" {
		if err := begun(); err != nil {
			return r, err
		}
		if line, err = lines.ReadString('\n'); err != nil {
			return r, fmt.Errorf("wait for the client's result: %w", err)
		}
	}
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		return r, fmt.Errorf("the client's result: %w", err)
	}
	if r.Failed != "" {
		err = errors.New(r.Failed)
	}
	return r, err
}
