package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/procid"
	"golang.org/x/sys/unix"
)

// Stats reads the costs of the sandbox's processes: the helper, gVisor's kernel, and
// the processes in which that runs programs.
func (s *sandbox) Stats(context.Context) (engine.Stats, error) {
	select {
	case <-s.done:
		return engine.Stats{}, s.ended()
	default:
	}
	st, err := ProcessStats(s.helper)
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Generation, st.LastFork = s.self.Generation.Load(), s.lastFork
	return st, err
}

// ProcessStats reads the memory and processor time of a helper and of all
// processes below it.
func ProcessStats(helper int) (st engine.Stats, err error) {
	p, err := ReadParts(helper)
	st.Own = p.Programs + p.Anonymous
	st.Proportional = st.Own + p.Files
	for _, pid := range family(helper) {
		used, _ := procid.CPUTime(pid) // the process may have ended
		st.CPU += used
	}
	return st, err
}

// Parts are the parts of a sandbox's memory, in bytes.
type Parts struct {
	// Programs is the memory of programs and of files that they have written. It is
	// one file in memory, which gVisor's kernel and its processes map in parts. All
	// allocated pages of it count, mapped or not.
	Programs uint64
	// Anonymous is the memory of the processes themselves.
	Anonymous uint64
	// Files is the processes' share of mapped files, such as the text of programs.
	Files uint64
	// PageTables are the page tables of the processes.
	PageTables uint64
}

// ReadParts reads the memory of a helper and of all processes below it.
func ReadParts(helper int) (p Parts, err error) {
	var mapped, allocated uint64
	seen := map[uint64]bool{}
	for _, pid := range family(helper) {
		folder := "/proc/" + strconv.Itoa(pid)
		roll, err := os.ReadFile(folder + "/smaps_rollup")
		if err != nil || len(roll) == 0 {
			if pid == helper {
				return p, fmt.Errorf("read the memory of gvisor-helper: %w", errors.Join(engine.ErrEnded, err))
			}
			continue // the process has ended meanwhile
		}
		p.Anonymous += field(roll, "Pss_Anon")
		p.Files += field(roll, "Pss_File")
		mapped += field(roll, "Pss_Shmem")
		allocated += memoryFiles(pid, seen)
		status, _ := os.ReadFile(folder + "/status") // the process may have ended
		p.PageTables += field(status, "VmPTE")
	}
	p.Programs = max(mapped, allocated)
	return p, nil
}

// field reads one line of a file in /proc, in bytes.
func field(roll []byte, name string) uint64 {
	for line := range strings.Lines(string(roll)) {
		key, rest, _ := strings.Cut(line, ":")
		if key == name {
			kib, _ := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10
		}
	}
	return 0
}

// family lists a process and all its descendants.
func family(pid int) []int {
	list := []int{pid}
	for i := 0; i < len(list); i++ {
		tasks, _ := filepath.Glob("/proc/" + strconv.Itoa(list[i]) + "/task/*/children")
		for _, t := range tasks {
			b, _ := os.ReadFile(t) // a thread that has ended has no such file
			for _, word := range strings.Fields(string(b)) {
				if child, err := strconv.Atoi(word); err == nil {
					list = append(list, child)
				}
			}
		}
	}
	return list
}

// memoryFiles adds up the allocated bytes of the files in memory that a process has
// open. It counts each file once.
func memoryFiles(pid int, seen map[uint64]bool) (bytes uint64) {
	dir := "/proc/" + strconv.Itoa(pid) + "/fd/"
	fds, _ := os.ReadDir(dir) // the process may have ended
	for _, fd := range fds {
		name, err := os.Readlink(dir + fd.Name())
		if err != nil || !strings.HasPrefix(name, "/memfd:runsc") {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(dir+fd.Name(), &st) == nil && !seen[st.Ino] {
			seen[st.Ino] = true
			bytes += uint64(st.Blocks) * statBlock
		}
	}
	return bytes
}

// statBlock is the unit of stat(2)'s st_blocks.
const statBlock = 512
