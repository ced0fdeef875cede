package jail

import (
	"fmt"
	"runtime"
	"time"
)

// Kind is what a jailed process is.
type Kind int

// The kinds of processes. A vmm runs one guest, is idle nearly always, and reaches
// no network. A netd is the network of a namespace's sandboxes: it serves many, and
// is in the machine's network.
const (
	VMM Kind = iota
	Netd
)

// String is the name of the program in the jail's root.
func (k Kind) String() string {
	if k == Netd {
		return "netd"
	}
	return "vmm"
}

// runtimeDebug are settings of the Go runtime of all jailed processes. Huge pages
// would make a heap of a few hundred KiB cost 4 MiB; there is no cgroup file to read a
// number of processors from; and names of mappings are for nobody.
const runtimeDebug = "GODEBUG=disablethp=1,containermaxprocs=0,updatemaxprocs=0,decoratemappings=0"

// netdProcessors bounds those that a netd uses at once: each TCP/IP stack of a
// sandbox has a goroutine per processor. Nor does it use more than half of the host's: at
// the other ends of its connections others compute, and to wake a processor for each step
// of a frame (poller, TCP, copy) costs more than the step.
const netdProcessors = 4

// environment is all that a process with these limits gets. A vmm begins with one
// processor, since each has caches of its own; vmmserver sets the number when it
// knows how many the guest needs. A netd collects garbage before the kernel would kill
// it for want of memory, of which socket buffers are a part, too. There are no files
// that would tell the time zone.
func (k Kind) environment(l Limits) []string {
	if k == VMM {
		return []string{runtimeDebug, "GOMAXPROCS=1"}
	}
	processors := max(1, min(netdProcessors, runtime.NumCPU()/2, int((l.MilliCPUs+999)/1000)))
	return []string{
		runtimeDebug, "TZ=UTC",
		fmt.Sprintf("GOMAXPROCS=%d", processors),
		fmt.Sprintf("GOMEMLIMIT=%d", l.Memory/4*3),
	}
}

// monitorSlack is that of the runtime monitor of these processes, which would look around
// every 20 µs from its start on.
//
// For a vmm that is hundreds of switches of threads until a fork has answered. It can be
// long: vmmserver makes a P for each vCPU, which spends its life in a system call, and one
// for the rest. For a netd it was an eighth of its time under load. None of its system
// calls waits, so nobody depends on the monitor to give the P of one away; if one of them
// takes long for once, others wait for a millisecond.
func (k Kind) monitorSlack() time.Duration {
	if k == VMM {
		return 10 * time.Millisecond
	}
	return time.Millisecond
}
