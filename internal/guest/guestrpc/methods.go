package guestrpc

import "time"

// AgentPort is the vsock port on which the agent listens in the guest. It is also the
// host's port that the agent dials once, to report that it listens.
const AgentPort = 1024

// Method is the method that a stream calls. The numbers are part of the protocol.
type Method uint16

// The methods. 68 to 79 are reserved for further parts of a fork's identity
// (secrets), 81 to 95 for ports.
const (
	MethodInfo     Method = 1
	MethodSync     Method = 2
	MethodShutdown Method = 3

	MethodExec        Method = 16
	MethodAttach      Method = 17
	MethodListExecs   Method = 18
	MethodSignal      Method = 19
	MethodResize      Method = 20
	MethodReleaseExec Method = 21
	MethodWriteStdin  Method = 22

	MethodStat     Method = 32
	MethodList     Method = 33
	MethodRead     Method = 34
	MethodWrite    Method = 35
	MethodMkdir    Method = 36
	MethodMove     Method = 37
	MethodRemove   Method = 38
	MethodSymlink  Method = 39
	MethodReadlink Method = 40
	MethodChmod    Method = 41
	MethodChown    Method = 42
	MethodWatch    Method = 43

	MethodRenew    Method = 64
	MethodPrepare  Method = 65
	MethodSetEnv   Method = 66
	MethodSetClock Method = 67

	MethodConnect Method = 80

	MethodCodeRun       Method = 96
	MethodCodeAttach    Method = 97
	MethodCodeInterrupt Method = 98
	MethodCodeRelease   Method = 99
	MethodCodeCreate    Method = 100
	MethodCodeList      Method = 101
	MethodCodeRestart   Method = 102
	MethodCodeClose     Method = 103
)

// toGuest returns the channels on which a method sends data to the guest.
func (m Method) toGuest() channelSet {
	switch m {
	case MethodExec, MethodAttach, MethodWrite, MethodConnect, MethodCodeRun:
		return channels(Stdin)
	}
	return 0
}

// toHost returns the channels on which a method sends data to the host.
func (m Method) toHost() channelSet {
	switch m {
	case MethodExec, MethodAttach:
		return channels(Stdout, Stderr)
	case MethodRead, MethodConnect:
		return channels(Stdout)
	case MethodWatch:
		return channels(Control)
	case MethodCodeRun, MethodCodeAttach:
		return channels(Stdout, Stderr, Control)
	}
	return 0
}

// streaming reports whether HEADERS comes first.
func (m Method) streaming() bool { return m.toHost() != 0 || m == MethodShutdown }

// empty is a request or reply without fields.
type empty struct{}

func (*empty) visit(*visitor) {}

// Info describes the agent and its guest.
type Info struct {
	AgentVersion string
	Kernel       string // release, as in uname
	Arch         string // such as x86_64
	Hostname     string
	BootID       string
	Uptime       time.Duration
	Generation   uint64 // raised by every fork
	Processes    uint32 // processes in the guest
	Execs        uint32 // running processes that were started with Exec
	MemoryTotal  uint64 // bytes
	MemoryFree   uint64
}

func (m *Info) visit(c *visitor) {
	c.str("agent version", &m.AgentVersion, maxShort)
	c.str("kernel", &m.Kernel, maxShort)
	c.str("machine", &m.Arch, maxShort)
	c.str("hostname", &m.Hostname, maxShort)
	c.str("boot id", &m.BootID, maxShort)
	c.dur(&m.Uptime)
	c.u64(&m.Generation)
	number(c, "processes", &m.Processes, 1<<32-1)
	number(c, "execs", &m.Execs, 1<<32-1)
	c.u64(&m.MemoryTotal)
	c.u64(&m.MemoryFree)
}

// ShutdownMode is the way in which a guest ends.
type ShutdownMode uint8

// The modes.
const (
	PowerOff ShutdownMode = 1
	Reboot   ShutdownMode = 2
)

// ShutdownRequest ends the guest. Every process gets SIGTERM, and the processes left
// after Grace get SIGKILL. File systems are synced and unmounted.
type ShutdownRequest struct {
	Mode  ShutdownMode
	Grace time.Duration
}

func (m *ShutdownRequest) visit(c *visitor) {
	number(c, "mode", &m.Mode, uint64(Reboot))
	c.dur(&m.Grace)
}
