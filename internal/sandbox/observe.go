package sandbox

import (
	"context"
	"errors"
	"time"
)

// Op is something that takes time and that an Observer is told about.
type Op string

// The operations. The first six are the manager's; the others are done by those
// who use a sandbox.
const (
	OpClaim     Op = "claim"     // until the sandbox has answered
	OpFork      Op = "fork"      // one machine of a template's snapshot, until it is ready
	OpLiveFork  Op = "live_fork" // all children of a running sandbox, until they are ready
	OpHibernate Op = "hibernate"
	OpWake      Op = "wake"
	OpBuild     Op = "build"
	OpExec      Op = "exec" // a program, until it has ended or its client has left
	OpCode      Op = "code" // likewise
	OpTerminal  Op = "terminal"
	OpPort      Op = "port" // a request or a connection to a port inside
)

// Work is one such operation.
type Work struct {
	Op Op
	// Pool is what the sandbox came from; that of a build is not set.
	Pool Key
	// Template and Stage are those of a build.
	Template Key
	Stage    Stage
	// Sandbox is whom it is about, if there is one yet.
	Sandbox ID
}

// Outcome is what became of it.
type Outcome struct {
	Err error
	// Waited says that a claim got a sandbox that was ready.
	Waited bool
	// Children and Failed are how many forks there are, and how many there are
	// not; Live is what they cost their source. All are of OpLiveFork.
	Children, Failed int
	Live             LiveForkStats
}

// LiveForkStats is what a live fork cost its source.
type LiveForkStats struct {
	// Pause is for how long the source stood still, LongestWait for how long one of
	// its writes to memory waited at most.
	Pause, LongestWait time.Duration
}

// Observer is told what happens, for those who count and measure. Its methods
// are called from many goroutines at once, and must neither wait nor call back.
type Observer interface {
	// Begin is called when an operation begins, and what it returns when it has
	// ended. The operation goes on with the context.
	Begin(ctx context.Context, w Work) (context.Context, func(Outcome))
	// Ended is called when a sandbox of a pool has ended.
	Ended(pool Key, why Reason)
	// Refused is called when there was no memory for a machine.
	Refused()
	// Journaled is called after each transaction that writes.
	Journaled(took time.Duration)
}

// Observers makes one observer of several; of none, one that does nothing.
func Observers(all ...Observer) Observer { return observers(all) }

type observers []Observer

func (all observers) Begin(ctx context.Context, w Work) (context.Context, func(Outcome)) {
	ends := make([]func(Outcome), len(all))
	for i, o := range all {
		ctx, ends[i] = o.Begin(ctx, w)
	}
	return ctx, func(out Outcome) {
		for i := len(ends) - 1; i >= 0; i-- { // those that began last end first
			ends[i](out)
		}
	}
}

func (all observers) Ended(pool Key, why Reason) {
	for _, o := range all {
		o.Ended(pool, why)
	}
}

func (all observers) Refused() {
	for _, o := range all {
		o.Refused()
	}
}

func (all observers) Journaled(took time.Duration) {
	for _, o := range all {
		o.Journaled(took)
	}
}

// Result says in one word what became of an operation: ok, cancelled, or the
// code of the error.
func (o Outcome) Result() string {
	var own *Error
	switch {
	case o.Err == nil:
		return "ok"
	case errors.As(o.Err, &own):
		return string(own.Code)
	case errors.Is(o.Err, context.Canceled):
		return "cancelled"
	}
	return string(CodeInternal)
}

// Work is something that is done with the sandbox.
func (s Sandbox) Work(op Op) Work { return Work{Op: op, Pool: s.PoolKey(), Sandbox: s.ID} }
