package sandbox

import (
	"context"
	"errors"
	"time"
)

// Op is an operation that takes time and that an Observer is told about.
type Op string

// The operations. The manager does the first six, and clients of a sandbox do
// the others.
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
	// Pool is the pool that the sandbox came from; a build has no pool.
	Pool Key
	// Template and Stage are set for a build only.
	Template Key
	Stage    Stage
	// Sandbox is the id of the sandbox, if there is one yet.
	Sandbox ID
}

// Outcome is the outcome of an operation.
type Outcome struct {
	Err error
	// Waited says that a claim got a sandbox that was ready.
	Waited bool
	// Children counts the children that were made, Failed those that were not.
	// Live is the cost for their source. All are set for OpLiveFork only.
	Children, Failed int
	Live             LiveForkStats
}

// LiveForkStats is the cost of a live fork for its source.
type LiveForkStats struct {
	// Pause is the time for which the source was paused. LongestWait is the longest
	// time that one of its writes to memory waited.
	Pause, LongestWait time.Duration
}

// Observer is told about operations and events, to count and measure them. Its
// methods are called from many goroutines at once, and must neither wait nor
// call back.
type Observer interface {
	// Begin is called when an operation begins. The operation continues with
	// the returned ctx, and calls the returned function when it has ended.
	Begin(ctx context.Context, w Work) (context.Context, func(Outcome))
	// Ended is called when a sandbox of a pool has ended.
	Ended(pool Key, why Reason)
	// Refused is called when there was no memory for a machine.
	Refused()
	// Journaled is called after each transaction that writes.
	Journaled(took time.Duration)
}

// Observers combines several observers. Without arguments it returns an
// observer that does nothing.
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

// Result describes the outcome of an operation in one word: ok, cancelled, or
// the code of the error.
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

// Work is an operation on the sandbox.
func (s Sandbox) Work(op Op) Work { return Work{Op: op, Pool: s.PoolKey(), Sandbox: s.ID} }
