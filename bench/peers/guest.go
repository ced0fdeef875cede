package peers

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"agentrun.dev/bench"
	"agentrun.dev/internal/guest/guestrpc"
)

// The functions of this file use guests that contain our agent.

func runProgram(ctx context.Context, agent *guestrpc.Client, program ...string) error {
	var stderr bytes.Buffer
	status, err := agent.Run(ctx, guestrpc.ExecRequest{Argv: program}, nil, nil, &stderr)
	if err != nil {
		return err
	}
	if status.Code != 0 {
		return fmt.Errorf("%s returned %d: %s", program[0], status.Code, stderr.Bytes())
	}
	return nil
}

// use runs a program in a fork that has answered, and reads the memory of its process
// before and after.
func (f forked) use(ctx context.Context, agent *guestrpc.Client, pid int, program string) (_ forked, err error) {
	if f.ownAfterAnswer, err = bench.Anonymous(pid); err != nil {
		return f, err
	}
	d, err := timed(time.Now(), func() error { return runProgram(ctx, agent, program) })
	if err != nil {
		return f, err
	}
	f.executed = f.renewed + d
	f.ownAfterExec, err = bench.Anonymous(pid)
	return f, err
}

// timed returns the time from begin until do has returned.
func timed(begin time.Time, do func() error) (time.Duration, error) {
	err := do()
	return time.Since(begin), err
}

// passScript starts a program that keeps size bytes of the guest's memory, and lets
// it write to each of their pages. It prints the longest write and the time of all of
// them, in nanoseconds. The program outlives the connection that started it, because
// Firecracker's snapshots end connections.
func passScript(size uint64) string {
	return fmt.Sprintf(`set -e
grep -q ' /dev/shm ' /proc/mounts || { mkdir -p /dev/shm; mount -t tmpfs none /dev/shm; }
cd /dev/shm
[ -p results ] || { mkfifo commands results; setsid touch-pages %d 1 0<>commands 1<>results 2>/dev/null & }
printf p >commands
read -r pass <results
echo "$pass"`, size>>20)
}

// pass is how long the guest takes to write to its memory once, by its own clock.
func pass(ctx context.Context, agent *guestrpc.Client, size uint64) (time.Duration, error) {
	var stdout, stderr bytes.Buffer
	status, err := agent.Run(ctx, guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", passScript(size)}}, nil, &stdout, &stderr)
	if err == nil && status.Code != 0 {
		err = fmt.Errorf("the shell returned %d: %s", status.Code, stderr.Bytes())
	}
	var longest, all time.Duration
	if err == nil {
		_, err = fmt.Sscan(stdout.String(), &longest, &all)
	}
	if err != nil {
		return 0, fmt.Errorf("write to the source's memory: %w", err)
	}
	return all, nil
}

// passes dirties a source's memory. The first pass may still pay for an earlier fork,
// so passes returns the time of the second.
func passes(ctx context.Context, agent *guestrpc.Client, size uint64) (time.Duration, error) {
	if _, err := pass(ctx, agent, size); err != nil {
		return 0, err
	}
	return pass(ctx, agent, size)
}
