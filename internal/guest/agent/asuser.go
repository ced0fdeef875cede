package agent

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// do runs fn with the filesystem rights of id. For root that is a plain call.
//
// For any other user, fn runs on an OS thread of its own whose filesystem uid, gid
// and supplementary groups are those of id (setfsuid(2): leaving fsuid 0 also takes
// CAP_DAC_OVERRIDE, CAP_CHOWN, CAP_FOWNER and their like out of the thread's
// effective set). The calls are raw: the Go wrappers change every thread of the
// process. The runtime never clones a new thread from a locked one, so the rights do
// not leak. A thread whose rights could not be given back stays locked when its
// goroutine returns, which makes the runtime end it.
//
// fn must do its work with system calls on the calling goroutine. Rights are checked
// when a file is opened, so the descriptor may be used afterwards from anywhere.
func (id *Identity) do(fn func() error) error {
	if id.root() {
		return fn()
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := switchRights(id.UID, id.GID, id.Groups)
		if err == nil {
			err = fn()
		} else {
			err = &Error{Kind: ErrPermission, Op: "take the rights of user", Thing: id.Name, Cause: err}
		}
		// The agent itself is always root with no supplementary groups.
		if switchRights(0, 0, nil) == nil {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

func switchRights(uid, gid uint32, groups []uint32) error {
	var list unsafe.Pointer
	if len(groups) > 0 {
		list = unsafe.Pointer(&groups[0])
	}
	// The kernel reads len(groups) 32-bit ids at list; groups outlives the call.
	_, _, errno := syscall.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(list), 0)
	runtime.KeepAlive(groups)
	if errno != 0 {
		return errno
	}
	if !setFSID(unix.SYS_SETFSGID, gid) || !setFSID(unix.SYS_SETFSUID, uid) {
		return syscall.EPERM
	}
	return nil
}

// setFSID sets the id and asks for it again: setfsuid(2) reports no errors.
func setFSID(trap uintptr, id uint32) bool {
	_, _, _ = syscall.RawSyscall(trap, uintptr(id), 0, 0)
	const none = ^uint32(0) // never valid: the call only returns the current id
	now, _, _ := syscall.RawSyscall(trap, uintptr(none), 0, 0)
	return uint32(now) == id
}
