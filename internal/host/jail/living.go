package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// living reports whether a user id has a process that is not about to end. The
// lock of the id is no proof: a process under an attacker's control can close
// the file. But it cannot leave its cgroup.
func (a *cells) living(uid int) (bool, error) {
	pids, err := a.processes(uid)
	if err != nil {
		return false, fmt.Errorf("look for processes of user id %d: %w", uid, err)
	}
	for _, pid := range pids {
		// The kernel shows 0 for a process outside of this pid namespace.
		if pid == 0 || !ending(pid) {
			return true, nil
		}
	}
	return false, nil
}

func (a *cells) processes(uid int) ([]int, error) {
	if a.groups != nil {
		return a.groups.processes(groupName(uid))
	}
	return processesOf(uid)
}

// processesOf finds the processes of a user id if there are no cgroups.
func processesOf(uid int) (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		info, err := e.Info()
		if err != nil {
			continue // it has ended
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) == uid {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// readProcesses reads a list of process ids. If the group is gone, the list is
// empty.
func readProcesses(path string) (pids []int, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || gone(err) {
		return nil, nil
	}
	for field := range strings.FieldsSeq(string(b)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		pids = append(pids, pid)
	}
	return pids, err
}

// exiting is PF_EXITING of linux/sched.h.
const exiting = 0x4

// ending reports whether all threads of a process are exiting. An exiting
// process closes its files before it leaves its group.
func ending(pid int) bool {
	threads, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/stat")
	if err != nil {
		return false // the pattern is valid, so this cannot happen
	}
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		// proc_pid_stat(5): the second field, in parentheses, may hold anything.
		_, rest, _ := strings.Cut(string(b[strings.LastIndexByte(string(b), ')')+1:]), " ")
		fields := strings.Fields(rest)
		const flagsAt = 9 - 3 // the ninth; the rest begins with the third
		if len(fields) <= flagsAt {
			return false
		}
		if flags, err := strconv.ParseUint(fields[flagsAt], 10, 64); err != nil || flags&exiting == 0 {
			return false
		}
	}
	return true
}
