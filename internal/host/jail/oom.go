package jail

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// sandboxScore is the oom_score_adj of a sandbox's processes. When the host runs
// out of memory, the kernel ends a sandbox before anything that the host needs,
// above all the daemon. A process inherits the score of its parent, which may be
// far below zero.
const sandboxScore = 500

// yieldMemory raises the score of a started process, and so the score of all
// processes that it will start.
func yieldMemory(pid int) error {
	path := "/proc/" + strconv.Itoa(pid) + "/oom_score_adj"
	b, err := os.ReadFile(path)
	if err == nil {
		var now int
		// A higher score stays: only root of the host may lower it.
		if now, err = strconv.Atoi(strings.TrimSpace(string(b))); err == nil && now < sandboxScore {
			err = os.WriteFile(path, []byte(strconv.Itoa(sandboxScore)), 0)
		}
	}
	if err != nil {
		return fmt.Errorf("let the process go first when memory is short: %w", err)
	}
	return nil
}
