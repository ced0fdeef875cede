package agent

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// SystemInfo describes the running sandbox.
type SystemInfo struct {
	Version     string // of the agent
	Kernel      string // release
	Arch        string // hardware name, such as x86_64
	Hostname    string
	BootID      string // "" without /proc
	Uptime      time.Duration
	Processes   int // in the sandbox, the agent included; 0 without /proc
	Execs       int // started here and still running
	MemoryTotal uint64
	MemoryFree  uint64
}

// Info describes the sandbox. version is the agent's own.
func (ps *Processes) Info(version string) (SystemInfo, error) {
	info := SystemInfo{Version: version}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return info, failed("read", "system name", err)
	}
	info.Kernel = unix.ByteSliceToString(uts.Release[:])
	info.Arch = unix.ByteSliceToString(uts.Machine[:])
	info.Hostname = unix.ByteSliceToString(uts.Nodename[:])
	if id, err := readFile("/proc/sys/kernel/random/boot_id", 64); err == nil {
		info.BootID = strings.TrimSpace(string(id))
	}
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return info, failed("read", "system information", err)
	}
	info.MemoryTotal = si.Totalram * uint64(si.Unit)
	info.MemoryFree = si.Freeram * uint64(si.Unit)
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return info, failed("read", "clock", err)
	}
	info.Uptime = time.Duration(ts.Nano())
	eachPID(func(int) { info.Processes++ })
	ps.mu.Lock()
	for _, p := range ps.byPID {
		if p.id != "" {
			info.Execs++
		}
	}
	ps.mu.Unlock()
	return info, nil
}
