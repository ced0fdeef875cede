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
	"golang.org/x/sys/unix"
)

// Stats reads what the sandbox's processes cost: the helper, gVisor's kernel,
// and the processes in which it runs programs.
func (s *sandbox) Stats(context.Context) (engine.Stats, error) {
	select {
	case <-s.done:
		return engine.Stats{}, s.ended()
	default:
	}
	st, err := ProcessStats(s.helper)
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Generation, st.LastFork = s.generation.Load(), s.lastFork
	return st, err
}

// ProcessStats reads the memory of a helper and of all processes below it.
//
// The memory of programs, and files that they have written, is one file in
// memory that gVisor's kernel and its processes map in parts: what is allocated
// of it counts, mapped or not.
func ProcessStats(helper int) (st engine.Stats, err error) {
	var shmem, allocated uint64
	seen := map[uint64]bool{}
	for _, pid := range family(helper) {
		roll, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/smaps_rollup")
		if err != nil || len(roll) == 0 {
			if pid == helper {
				return st, fmt.Errorf("read the memory of gvisor-helper: %w", errors.Join(engine.ErrEnded, err))
			}
			continue // it has ended meanwhile
		}
		st.Own += field(roll, "Pss_Anon")
		st.Proportional += field(roll, "Pss_File")
		shmem += field(roll, "Pss_Shmem")
		allocated += memoryFiles(pid, seen)
	}
	st.Own += max(shmem, allocated)
	st.Proportional += st.Own
	return st, nil
}

// field reads a line of smaps_rollup, in bytes.
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

// family lists a process and all that descend from it.
func family(pid int) []int {
	list := []int{pid}
	for i := 0; i < len(list); i++ {
		tasks, _ := filepath.Glob("/proc/" + strconv.Itoa(list[i]) + "/task/*/children")
		for _, t := range tasks {
			b, _ := os.ReadFile(t) // a thread that has ended has none
			for _, word := range strings.Fields(string(b)) {
				if child, err := strconv.Atoi(word); err == nil {
					list = append(list, child)
				}
			}
		}
	}
	return list
}

// memoryFiles adds up what is allocated in the files in memory that a process
// has open, each once.
func memoryFiles(pid int, seen map[uint64]bool) (bytes uint64) {
	dir := "/proc/" + strconv.Itoa(pid) + "/fd/"
	fds, _ := os.ReadDir(dir) // it may have ended
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
