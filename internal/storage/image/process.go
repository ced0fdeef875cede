package image

import (
	"os/exec"
	"runtime"
)

// runLocked runs a command that is to die with this process: its parent-death
// signal comes when the thread that started it ends, so that thread waits.
func runLocked(cmd *exec.Cmd) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with this goroutine, after the command
		done <- cmd.Run()
	}()
	return <-done
}
