package peers

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"agentrun.dev/bench"
	"agentrun.dev/internal/guestrpc"
)

// What is done inside guests that have our agent.

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

func runShell(ctx context.Context, agent *guestrpc.Client, script string) error {
	return runProgram(ctx, agent, "/bin/sh", "-c", script)
}

// use runs a program in a fork that has answered, with a look at the memory of
// its process before and after.
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

// timed is how long after begin something was done.
func timed(begin time.Time, do func() error) (time.Duration, error) {
	err := do()
	return time.Since(begin), err
}

// dirtyScript writes fresh content to size bytes of the guest's memory, to the
// same place each time.
func dirtyScript(size uint64) string {
	const piece = 4 // MiB
	return fmt.Sprintf(`set -e
grep -q ' /dev/shm ' /proc/mounts || { mkdir -p /dev/shm; mount -t tmpfs none /dev/shm; }
mount -o remount,size=90%% /dev/shm
dd if=/dev/urandom of=/dev/shm/seed bs=1M count=%d 2>/dev/null
i=0; while [ $i -lt %d ]; do dd if=/dev/shm/seed of=/dev/shm/dirt bs=1M seek=$((i*%d)) conv=notrunc 2>/dev/null; i=$((i+1)); done`,
		piece, (size>>20)/piece, piece)
}
