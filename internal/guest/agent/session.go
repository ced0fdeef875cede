package agent

import (
	"bytes"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxPasses bounds the walks over /proc of one session signal. A process that
// forks faster than we walk is met again in the next pass.
const maxPasses = 32

// signalSession signals every process whose session is sid once, and reports whether
// it found any. It walks /proc again until a pass finds no new process, and so finds
// children made meanwhile.
func signalSession(sid int, sig syscall.Signal) bool {
	// The group comes first: the kernel signals it in one call, without a race.
	sent := syscall.Kill(-sid, sig) == nil
	var met map[int]struct{}
	for range maxPasses {
		fresh := false
		eachPID(func(pid int) {
			group, session, ok := groupAndSession(pid)
			if !ok || session != sid || (group == sid && sent && sig != syscall.SIGKILL) {
				return
			}
			if _, seen := met[pid]; seen {
				return
			}
			if met == nil {
				met = make(map[int]struct{}, 8)
			}
			met[pid] = struct{}{}
			fresh = true
			if signalMember(pid, sid, sig) {
				sent = true
			}
		})
		if !fresh {
			break
		}
	}
	return sent
}

// signalMember signals pid if it still belongs to session sid. The descriptor pins
// the process, so the check and the signal concern the same process.
func signalMember(pid, sid int, sig syscall.Signal) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	if _, session, ok := groupAndSession(pid); !ok || session != sid {
		return false
	}
	return unix.PidfdSendSignal(fd, sig, nil, 0) == nil
}

// eachPID calls fn for every process in /proc, as far as it can be read.
func eachPID(fn func(pid int)) {
	fd, err := open(unix.AT_FDCWD, "/proc", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_ = eachName(fd, func(name []byte) bool {
		if name[0] >= '1' && name[0] <= '9' {
			if pid, err := strconv.Atoi(string(name)); err == nil {
				fn(pid)
			}
		}
		return true
	})
}

// groupAndSession reads fields 5 and 6 of /proc/PID/stat (proc_pid_stat(5)). A
// zombie counts as gone.
func groupAndSession(pid int) (group, session int, ok bool) {
	var buf [512]byte
	fd, err := open(unix.AT_FDCWD, "/proc/"+strconv.Itoa(pid)+"/stat", unix.O_RDONLY, 0)
	if err != nil {
		return 0, 0, false
	}
	n, _ := unix.Read(fd, buf[:])
	unix.Close(fd)
	return parseStat(buf[:max(n, 0)])
}

// parseStat takes the fields behind the last ')': the command name before it
// may hold anything, blanks and parentheses included.
func parseStat(stat []byte) (group, session int, ok bool) {
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 || len(stat) < i+3 {
		return 0, 0, false
	}
	rest := stat[i+2:] // "S ppid pgrp session ..."
	if rest[0] == 'Z' || rest[0] == 'X' {
		return 0, 0, false
	}
	var f [4][]byte
	for k := range f {
		var more bool
		if f[k], rest, more = bytes.Cut(rest, []byte{' '}); !more {
			return 0, 0, false
		}
	}
	group, err1 := strconv.Atoi(string(f[2]))
	session, err2 := strconv.Atoi(string(f[3]))
	return group, session, err1 == nil && err2 == nil
}

func pidInUse(pid int) bool {
	return syscall.Kill(pid, 0) != syscall.ESRCH
}
