package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"agentrun.dev/internal/network/netctl"
	"golang.org/x/sys/unix"
)

// IdleWires measures the cost of wires on which nothing was ever sent.
type IdleWires struct {
	Wires int `json:"wires"`
	// Anonymous is how much the memory of netd has grown for each wire. Kernel is how
	// much the kernel's memory has grown, including the wire's sockets.
	Anonymous int64 `json:"anonymous_bytes"`
	Kernel    int64 `json:"kernel_bytes"`
	// KernelFrom says where Kernel was measured: cgroup or machine.
	KernelFrom string `json:"kernel_memory_of"`
	// Attach is the time of one request; the requests follow each other.
	Attach Summary `json:"attach"`
}

// idleWires attaches wires whose other ends are not used, to a netd without other
// work: a netd that has carried bytes has free room in its heap.
func (b *networkBench) idleWires(ctx context.Context) (_ *IdleWires, err error) {
	netd, client, err := b.startNetd(ctx, "netd-idle")
	if err != nil {
		return nil, err
	}
	kernel := newKernelMemory()
	idle := &IdleWires{Wires: b.cfg.Wires, KernelFrom: kernel.From}
	var ends []*os.File
	defer func() {
		for _, f := range ends {
			err = errors.Join(err, f.Close())
		}
	}()
	attach := func(id netctl.ID) (time.Duration, error) {
		end, took, err := attachIdle(ctx, client, id)
		if end != nil {
			ends = append(ends, end)
		}
		return took, err
	}
	// Some time after its first wire, a netd has returned the memory that its start
	// has left.
	if _, err := attach("first"); err != nil {
		return nil, err
	}
	before, err := settled(ctx, netd.PID())
	if err != nil {
		return nil, err
	}
	kernelBefore, err := kernel.read()
	if err != nil {
		return nil, err
	}
	var took []time.Duration
	for i := range b.cfg.Wires {
		d, err := attach(netctl.ID(fmt.Sprintf("idle-%d", i)))
		if err != nil {
			return nil, err
		}
		took = append(took, d)
	}
	after, err := settled(ctx, netd.PID())
	if err != nil {
		return nil, err
	}
	grown, err := kernel.grown(kernelBefore)
	idle.Attach = Summarize(took)
	idle.Anonymous = (int64(after) - int64(before)) / int64(b.cfg.Wires)
	idle.Kernel = grown / int64(b.cfg.Wires)
	return idle, err
}

// attachIdle attaches a wire. It returns the wire's other end, and how long the
// request took.
func attachIdle(ctx context.Context, client *netctl.Client, id netctl.ID) (*os.File, time.Duration, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("make a wire: %w", err)
	}
	host, guest := os.NewFile(uintptr(pair[0]), "wire"), os.NewFile(uintptr(pair[1]), "wire")
	start := time.Now()
	err = client.Attach(ctx, wireOf(id), host)
	return guest, time.Since(start), errors.Join(err, host.Close())
}

// settled is the anonymous memory of a process once it is stable: unchanged for
// longer than a netd takes to return the memory of requests. There is no event for
// that.
func settled(ctx context.Context, pid int) (uint64, error) {
	const pause, enough, patience = 100 * time.Millisecond, 3 * time.Second, 60 * time.Second
	last, err := Anonymous(pid)
	if err != nil {
		return 0, err
	}
	quiet := time.Duration(0)
	for begin := time.Now(); quiet < enough; quiet += pause {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		now, err := Anonymous(pid)
		if err != nil {
			return 0, err
		}
		if now != last {
			last, quiet = now, 0
		}
		if time.Since(begin) > patience {
			return 0, fmt.Errorf("the memory of process %d changes all the time, although nothing is asked of it", pid)
		}
	}
	return last, nil
}
