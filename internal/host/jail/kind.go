package jail

import (
	"fmt"
	"runtime"
	"time"
)

// Kind is the kind of a jailed process.
type Kind int

// The kinds of processes. A vmm runs one guest, is idle nearly always, and reaches
// no network. A netd is the network of a namespace's sandboxes: it serves many
// sandboxes and is in the host's network.
const (
	VMM Kind = iota
	Netd
)

// String is the name of the kind, and of its program in the jail's root.
func (k Kind) String() string {
	if k == Netd {
		return "netd"
	}
	return "vmm"
}

// runtimeDebug holds the settings of the Go runtime for all jailed processes. With
// huge pages a heap of a few hundred KiB would cost 4 MiB. The empty root has no
// cgroup file from which the runtime could read a number of processors. No tool
// reads the names of these processes' mappings.
const runtimeDebug = "GODEBUG=disablethp=1,containermaxprocs=0,updatemaxprocs=0,decoratemappings=0"

// netdProcessors bounds the processors that a netd uses at once, because each TCP/IP
// stack of a sandbox starts a goroutine per processor. A netd also uses at most half of
// the host's processors: the other ends of its connections compute on the rest, and
// waking a processor for each step of a frame (poller, TCP, copy) costs more than the
// step.
const netdProcessors = 4

// environment is the complete environment of a process with these limits. A vmm begins
// with one processor, since each has caches of its own; vmmserver raises the number
// when it knows how many the guest needs. A netd collects garbage well below the limit
// at which the kernel would kill it, because socket buffers count towards that limit,
// too. The time zone is set because the empty root has no time zone files.
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

// monitorSlack is the timer slack of the runtime's monitor thread in these processes. The
// monitor would otherwise wake every 20 µs from the start of the process.
//
// In a vmm those wakes cost hundreds of thread switches before a fork has answered. Its
// slack can be long: vmmserver makes a P for each vCPU, which spends its life in a system
// call, and one more for the rest. In a netd under load the monitor took an eighth of the
// processor time. The system calls of a netd do not block, so no goroutine depends on the
// monitor to take a P away; if one call is slow nevertheless, others wait for a
// millisecond.
func (k Kind) monitorSlack() time.Duration {
	if k == VMM {
		return 10 * time.Millisecond
	}
	return time.Millisecond
}
