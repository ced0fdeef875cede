package agent

import (
	"bytes"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Action is how a guest ends.
type Action uint8

// The actions.
const (
	PowerOff Action = iota
	Reboot
)

// killWait bounds the wait after SIGKILL, since a process that waits uninterruptibly
// for a missing disk never ends.
const killWait = 5 * time.Second

// Shutdown ends the guest, and returns only if that failed. Every process gets
// SIGTERM and, after grace, SIGKILL. Shutdown continues as soon as all processes have
// ended. Filesystems are synced and made read-only before the kernel is told. system
// may be nil.
func Shutdown(ps *Processes, system *System, action Action, grace time.Duration) error {
	// kill(-1) signals all processes, and reboot(2) would reboot the host, so only
	// PID 1 may call them.
	if os.Getpid() != 1 {
		return fail(ErrPermission, "shut down", "", "only PID 1 can")
	}
	if !ps.cfg.Orphans {
		return fail(ErrInvalid, "shut down", "", "Config.Orphans must be set in PID 1")
	}
	if action > Reboot {
		return fail(ErrInvalid, "shut down", "", "unknown action")
	}
	ps.refuse()
	endAll(ps, max(grace, 0))
	unix.Sync()
	unmountAll(ps.log)
	if system != nil && system.upper >= 0 {
		if err := remountUpper(system.upper); err != nil {
			ps.log(err.Error())
		}
	}
	unix.Sync()
	cmd := unix.LINUX_REBOOT_CMD_POWER_OFF
	if action == Reboot {
		cmd = unix.LINUX_REBOOT_CMD_RESTART
	}
	return failed("shut down", "", unix.Reboot(cmd))
}

// endAll ends every process but this one.
func endAll(ps *Processes, grace time.Duration) {
	gone := ps.awaitChildless()
	_ = syscall.Kill(-1, syscall.SIGTERM) // ESRCH: no other process exists
	_ = syscall.Kill(-1, syscall.SIGCONT) // a stopped process would not notice SIGTERM
	if within(gone, grace) {
		return
	}
	_ = syscall.Kill(-1, syscall.SIGKILL) // ESRCH: the last one has just ended
	if !within(gone, killWait) {
		ps.log("shut down: some processes did not end after SIGKILL")
	}
}

func within(gone <-chan struct{}, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-gone:
		return true
	case <-timer.C:
		return false
	}
}

// unmountAll unmounts the filesystems that the sandbox mounted, newest first. It
// makes the others read-only if they hold data that could be lost.
func unmountAll(log func(string)) {
	table, err := readFile("/proc/self/mountinfo", 4<<20)
	if err != nil {
		log(failed("read", "/proc/self/mountinfo", err).Error())
		return
	}
	var mounts []mountLine
	for line := range lines(table) {
		if m, ok := parseMountLine(line); ok {
			mounts = append(mounts, m)
		}
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		m := mounts[i]
		if kernelFolder(m.dir) {
			continue
		}
		if m.dir != "/" && unix.Unmount(m.dir, unix.UMOUNT_NOFOLLOW) == nil {
			continue
		}
		if m.fstype == "tmpfs" || m.fstype == "ramfs" || m.fstype == "rootfs" {
			continue // its contents end with the guest
		}
		if err := unix.Mount("", m.dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil && m.writable {
			log(failed("make read-only", m.dir+" ("+m.fstype+")", err).Error())
		}
	}
}

func kernelFolder(dir string) bool {
	for _, top := range []string{"/proc", "/sys", "/dev"} {
		if dir == top || strings.HasPrefix(dir, top+"/") {
			return true
		}
	}
	return false
}

type mountLine struct {
	dir, fstype string
	writable    bool
}

// parseMountLine reads a line of mountinfo (proc_pid_mountinfo(5)): six fields,
// optional ones, a "-", then the type.
func parseMountLine(line []byte) (mountLine, bool) {
	words := bytes.Split(line, []byte{' '})
	if len(words) < 10 {
		return mountLine{}, false
	}
	for i := 6; i < len(words)-1; i++ {
		if string(words[i]) == "-" {
			opts := words[5]
			return mountLine{
				dir:      unescapeOctal(words[4]),
				fstype:   string(words[i+1]),
				writable: string(opts) == "rw" || bytes.HasPrefix(opts, []byte("rw,")),
			}, true
		}
	}
	return mountLine{}, false
}

// unescapeOctal undoes \040 and its like.
func unescapeOctal(b []byte) string {
	out := make([]byte, 0, len(b))
	for i := 0; i < len(b); i++ {
		if b[i] == '\\' && i+3 < len(b) && octal(b[i+1]) && octal(b[i+2]) && octal(b[i+3]) {
			out = append(out, (b[i+1]-'0')<<6|(b[i+2]-'0')<<3|(b[i+3]-'0'))
			i += 3
			continue
		}
		out = append(out, b[i])
	}
	return string(out)
}

func octal(c byte) bool { return c >= '0' && c <= '7' }

// remountUpper makes the disk under the overlay read-only through a descriptor,
// since it has no path (fspick(2)): it is clean then, with an empty journal.
func remountUpper(fd int) error {
	const what = "the overlay's disk"
	ctx, err := unix.Fspick(fd, "", unix.FSPICK_EMPTY_PATH|unix.FSPICK_CLOEXEC)
	if err != nil {
		return failed("make read-only", what, err)
	}
	defer unix.Close(ctx)
	if err := unix.FsconfigSetFlag(ctx, "ro"); err != nil {
		return failed("make read-only", what, err)
	}
	return failed("make read-only", what, unix.FsconfigReconfigure(ctx))
}
