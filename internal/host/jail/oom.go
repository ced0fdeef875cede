package jail

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// sandboxScore is the oom_score_adj of a sandbox's processes: when the machine
// runs out of memory, the kernel ends a sandbox before it ends anything that the
// machine needs, the daemon above all. A process inherits the score of the one
// that starts it, which may be far below zero.
const sandboxScore = 500

// yieldMemory raises the score of a process that was started, and so that of
// all that it will start.
func yieldMemory(pid int) error {
	path := "/proc/" + strconv.Itoa(pid) + "/oom_score_adj"
	b, err := os.ReadFile(path)
	if err == nil {
		var now int
		// One that is higher already stays: only root of the machine may lower it.
		if now, err = strconv.Atoi(strings.TrimSpace(string(b))); err == nil && now < sandboxScore {
			err = os.WriteFile(path, []byte(strconv.Itoa(sandboxScore)), 0)
		}
	}
	if err != nil {
		return fmt.Errorf("let the process go first when memory is short: %w", err)
	}
	return nil
}
