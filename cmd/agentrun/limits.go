package main

import (
	"fmt"
	"math"
	"strconv"

	"agentrun.dev/cmd/internal/cli"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"github.com/spf13/pflag"
)

// startsNothing is the policy of commands that only look at sandboxes, or end them. It
// accepts missing limits and walls: the commands must also find sandboxes that were
// allowed to run without them.
var startsNothing = microvm.JailPolicy{AllowUnlimited: true, AllowUnjailed: true}

// limitFlags are those of commands that make sandboxes.
func limitFlags(f *pflag.FlagSet, l *engine.Limits) {
	f.Var((*milliCPUs)(&l.MilliCPUs), "cpu-limit", "processors' time that a sandbox may take, such as 0.5 (default: its processors and one more for its devices)")
	f.Var((*cli.ByteSize)(&l.IO.BytesPerSecond), "io-bytes", "bytes per second that each disk of a sandbox may read and write, such as 50M (default: no limit)")
	f.Uint64Var(&l.IO.OpsPerSecond, "io-ops", 0, "requests per second that each disk of a sandbox may serve (default: no limit)")
}

// milliCPUs is a flag in processors.
type milliCPUs uint64

func (m *milliCPUs) String() string {
	if *m == 0 {
		return ""
	}
	return strconv.FormatFloat(float64(*m)/1000, 'f', -1, 64)
}

func (m *milliCPUs) Type() string { return "cpus" }

// The kernel rejects less than a hundredth of a processor.
const minCPULimit, maxCPULimit = 0.01, 1024

func (m *milliCPUs) Set(s string) error {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v >= minCPULimit && v <= maxCPULimit) {
		return fmt.Errorf("%q is no number of processors between %v and %v", s, minCPULimit, maxCPULimit)
	}
	*m = milliCPUs(math.Round(v * 1000))
	return nil
}
