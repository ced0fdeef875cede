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

// clockTick is the unit of processor time in /proc, USER_HZ: the same on all machines
// that Linux runs on with x86 or ARM.
const clockTick = time.Second / 100

// familyCPU is the processor time that a process has used so far, with those that it has
// started, directly or not, and with those of them that have ended and were waited for.
func familyCPU(pid int) (sum time.Duration, err error) {
	list := []int{pid}
	for i := 0; i < len(list); i++ {
		own, waited, err := processCPU(list[i])
		if err != nil && i == 0 {
			return 0, err
		}
		sum += own + waited // nothing of a process that has ended meanwhile
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
	return sum, nil
}

// processCPU is what a process itself has used, and what those of its children have that
// have ended and were waited for.
func processCPU(pid int) (own, waited time.Duration, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, fmt.Errorf("read the processor time of a process: %w", err)
	}
	return parseStat(b)
}

// parseStat reads the fields utime, stime, cutime and cstime, proc_pid_stat(5). The
// name of the process, which comes before them in brackets, may have anything in it.
func parseStat(b []byte) (own, waited time.Duration, err error) {
	const first = 11 // behind the brackets
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
