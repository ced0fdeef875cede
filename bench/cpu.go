package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// clockTick is the unit of processor time in /proc, USER_HZ. It is the same on all
// Linux machines with x86 or ARM.
const clockTick = time.Second / 100

// familyCPU is the processor time used so far by a process and its living
// descendants. It includes descendants that have ended and were waited for.
func familyCPU(pid int) (sum time.Duration, err error) {
	list := []int{pid}
	for i := 0; i < len(list); i++ {
		own, waited, err := processCPU(list[i])
		if err != nil && i == 0 {
			return 0, err
		}
		sum += own + waited // 0 for a process that has ended meanwhile
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
	return sum, nil
}

// processCPU returns the time that a process itself has used, and the time of its
// children that have ended and were waited for.
func processCPU(pid int) (own, waited time.Duration, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, fmt.Errorf("read the processor time of a process: %w", err)
	}
	return parseStat(b)
}

// parseStat reads the fields utime, stime, cutime and cstime, proc_pid_stat(5). The
// name of the process precedes them in brackets, and may contain any characters.
func parseStat(b []byte) (own, waited time.Duration, err error) {
	const first = 11 // after the brackets
	var ticks [4]int64
	words := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(words) < first+len(ticks) {
		return 0, 0, fmt.Errorf("a line of %d fields is not that of a process", len(words))
	}
	for i := range ticks {
		if ticks[i], err = strconv.ParseInt(words[first+i], 10, 64); err != nil {
			return 0, 0, fmt.Errorf("parse the processor time of a process: %w", err)
		}
	}
	return time.Duration(ticks[0]+ticks[1]) * clockTick, time.Duration(ticks[2]+ticks[3]) * clockTick, nil
}
