package jail

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// OpenPagemap opens the page map of a process that cannot open it itself. A
// page map opened with CAP_SYS_ADMIN also reveals the physical addresses of the
// pages. A vmm does not need them, and an attacker would use them.
func OpenPagemap(pid int) (f *os.File, err error) {
	err = withoutAdmin(func() (err error) {
		f, err = os.Open("/proc/" + strconv.Itoa(pid) + "/pagemap")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the page map of the vmm process: %w", err)
	}
	return f, nil
}

// withoutAdmin runs do on a thread that has dropped CAP_SYS_ADMIN.
func withoutAdmin(do func() error) error {
	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var before [2]unix.CapUserData
	if err := unix.Capget(&header, &before[0]); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	reduced := before
	reduced[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	if err := unix.Capset(&header, &reduced[0]); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	err := do()
	if back := unix.Capset(&header, &before[0]); back != nil {
		return errors.Join(err, back) // the thread stays locked and ends with the goroutine
	}
	runtime.UnlockOSThread()
	return err
}
