// Package lockdown takes from a process, for good, all rights that it does not
// need once it serves a guest: capabilities, core dumps, and all system calls
// except those that a vmm, or netd, and its Go runtime make. If the process
// makes any other call, the kernel kills it.
//
// This is the inner wall. Package jail builds the outer ones, which a process
// cannot put around itself without opening paths.
package lockdown

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Enter locks down the whole process: all of its threads and all later ones.
// From then on ioctl(2) accepts only the requests in ioctls.
func Enter(ioctls []uint32) error {
	if err := giveUp(maxFiles); err != nil {
		return err
	}
	return filterCalls(vmmRules(os.Getpid(), ioctls))
}

// giveUp drops all rights except system calls.
func giveUp(files uint64) error {
	if err := dropCapabilities(); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	// A core would hold the guest's memory. A limit of one byte, unlike a limit
	// of 0, also keeps the kernel from starting a handler for it (core(5)).
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	if err := limitOpenFiles(files); err != nil {
		return fmt.Errorf("limit open files: %w", err)
	}
	if err := forbidMerging(); err != nil {
		return fmt.Errorf("keep the kernel from merging memory: %w", err)
	}
	return nil
}

// filterCalls allows only the system calls of these rules.
func filterCalls(rules []rule) error {
	filter, err := assemble(rules)
	if err == nil {
		err = install(filter)
	}
	if err != nil {
		return fmt.Errorf("filter system calls: %w", err)
	}
	return nil
}

// forbidMerging keeps the kernel from merging equal pages of this process and of
// others (KSM). A process inherits permission to merge from its parent, for
// example from a unit with MemoryKSM=yes. A merged page loses the write
// protection of userfaultfd: a capture would lack it (package guestmem).
func forbidMerging() error {
	err := unix.Prctl(unix.PR_SET_MEMORY_MERGE, 0, 0, 0, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil // before Linux 6.4, or without KSM: no permission is inherited
	}
	return err
}

// maxFiles is how many descriptors a vmm can have: one for each stream to the
// guest (virtio.MaxVsockConns), and those of disks, captures and the rest.
const maxFiles = 1024

func limitOpenFiles(most uint64) error {
	var now unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &now); err != nil {
		return err
	}
	most = min(now.Max, most)
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: most, Max: most})
}

// LimitFileSize bounds, for good, the size to which the process can extend a file
// by writing to it; beyond that it gets EFBIG. It is called after Enter, when the
// sizes of the guest's disks and memory are known.
func LimitFileSize(bytes uint64) error {
	if err := unix.Prlimit(0, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: bytes, Max: bytes}, nil); err != nil {
		return fmt.Errorf("limit the size of files to %d bytes: %w", bytes, err)
	}
	return nil
}

// dropCapabilities makes sure that no thread has capabilities. A process
// started by package jail has no capabilities from the start.
func dropCapabilities() error {
	have, err := capabilities()
	if err != nil || !have {
		return err
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	// Capabilities are per thread; threads that already run must lose theirs,
	// too.
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&none)), 0)
	if errno != 0 {
		return errno
	}
	if have, err = capabilities(); err == nil && have {
		err = errors.New("the kernel has left some")
	}
	return err
}

// capabilities reports whether the thread has any capability.
func capabilities() (bool, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false, err
	}
	return data != [2]unix.CapUserData{}, nil
}

// install puts a filter on all threads at once. No thread can escape it in
// time.
func install(p []unix.SockFilter) error {
	runtime.LockOSThread() // no_new_privs is set per thread; installing the filter sets it on all
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	prog := unix.SockFprog{Len: uint16(len(p)), Filter: &p[0]}
	// The kernel copies the program before the call returns.
	tid, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(p)
	if errno != 0 {
		return errno
	}
	if tid != 0 {
		return fmt.Errorf("thread %d has a filter of its own", tid)
	}
	return nil
}
