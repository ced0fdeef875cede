package helper

import (
	"fmt"
	"runtime/debug"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/bpf"
	"gvisor.dev/gvisor/pkg/seccomp"
)

// lockDown takes from this process, for good, the rights that it does not need once
// its sandbox is made. It drops all capabilities except the one to kill the sandbox,
// whose kernel has another user id. It forbids all system calls except those for
// files, unix sockets and the Go runtime. The process can then start no program and
// trace none.
//
// A forbidden call fails, but does not kill the process: calls that runsc tries while
// it exits must not take a sandbox along.
func lockDown(f *compiling) error {
	if err := keepCapabilities(unix.CAP_KILL); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	<-f.done
	if f.err == nil {
		f.err = seccomp.SetFilter(f.code) // on all threads
	}
	if f.err != nil {
		return fmt.Errorf("filter system calls: %w", f.err)
	}
	// Otherwise each sandbox would keep the memory of the compilation, a megabyte.
	f.code = nil
	go debug.FreeOSMemory()
	return nil
}

// compiling is the filter while it is being compiled, which takes some milliseconds.
type compiling struct {
	done chan struct{} // closed once the other fields are set
	code []bpf.Instruction
	err  error
}

// compile starts the compilation. The sandbox is made meanwhile.
func compile() *compiling {
	f := &compiling{done: make(chan struct{})}
	go func() {
		f.code, _, f.err = lockdownFilter().Build()
		close(f.done)
	}()
	return f
}

// keepCapabilities drops all capabilities but one, on all threads.
func keepCapabilities(one uint) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	keep := data[0].Permitted & (1 << one)
	data = [2]unix.CapUserData{{Effective: keep, Permitted: keep}}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0); errno != 0 {
		return errno
	}
	return nil
}

// threadFlags are the flags with which the Go runtime makes a thread.
const threadFlags = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND |
	unix.CLONE_SYSVSEM | unix.CLONE_THREAD | unix.CLONE_SETTLS

func lockdownFilter() *seccomp.Program {
	any := seccomp.AnyValue{}
	noCode := seccomp.PerArg{any, any, seccomp.MaskedEqual(unix.PROT_EXEC, 0)}
	rules := map[uintptr]seccomp.SyscallRule{
		unix.SYS_SOCKET:   seccomp.PerArg{seccomp.EqualTo(unix.AF_UNIX)},
		unix.SYS_CLONE:    seccomp.PerArg{seccomp.EqualTo(threadFlags)},
		unix.SYS_PRCTL:    seccomp.PerArg{seccomp.EqualTo(unix.PR_SET_VMA)}, // the runtime names its mappings
		unix.SYS_MMAP:     noCode,
		unix.SYS_MPROTECT: noCode,
	}
	for _, number := range lockdownAllowed {
		rules[number] = seccomp.MatchAll{}
	}
	return &seccomp.Program{
		RuleSets: []seccomp.RuleSet{
			// The flags of clone3 are in memory, which a filter cannot read. Without
			// clone3, callers use clone.
			{Rules: seccomp.MakeSyscallRules(map[uintptr]seccomp.SyscallRule{unix.SYS_CLONE3: seccomp.MatchAll{}}), Action: seccomp.ReturnError.Code(uint16(unix.ENOSYS))},
			{Rules: seccomp.MakeSyscallRules(rules), Action: seccomp.Allow},
		},
		Options: seccomp.ProgramOptions{DefaultAction: seccomp.ReturnError.Code(uint16(unix.EPERM)), BadArchAction: seccomp.KillProcess},
	}
}

// lockdownAllowed are the calls that are allowed with any arguments.
var lockdownAllowed = []uintptr{
	// Descriptors.
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_PREAD64, unix.SYS_PWRITE64,
	unix.SYS_CLOSE, unix.SYS_FSTAT, unix.SYS_LSEEK, unix.SYS_FCNTL, unix.SYS_FLOCK, unix.SYS_FTRUNCATE, unix.SYS_FSYNC,
	unix.SYS_DUP, unix.SYS_DUP3, unix.SYS_PIPE2,
	// Files: of the sandbox's folder, of checkpoints, of the sandbox's process.
	unix.SYS_OPENAT, unix.SYS_NEWFSTATAT, unix.SYS_STATX, unix.SYS_FACCESSAT, unix.SYS_FACCESSAT2, unix.SYS_READLINKAT,
	unix.SYS_GETDENTS64, unix.SYS_MKDIRAT, unix.SYS_SYMLINKAT, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2,
	// The shared memory through which a streamed checkpoint is requested.
	unix.SYS_MEMFD_CREATE,
	// Unix sockets.
	unix.SYS_CONNECT, unix.SYS_ACCEPT4, unix.SYS_SENDMSG, unix.SYS_RECVMSG, unix.SYS_SENDTO, unix.SYS_RECVFROM, unix.SYS_SHUTDOWN,
	unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME, unix.SYS_GETSOCKOPT,
	// The end of the sandbox's processes.
	unix.SYS_KILL, unix.SYS_TGKILL, unix.SYS_WAIT4, unix.SYS_WAITID, unix.SYS_PIDFD_OPEN, unix.SYS_PIDFD_SEND_SIGNAL,
	// Waiting.
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_POLL, unix.SYS_PPOLL,
	unix.SYS_FUTEX, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_RESTART_SYSCALL,
	// Memory, threads, signals, time, random numbers.
	unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_BRK, unix.SYS_SYSINFO,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK,
	unix.SYS_GETPID, unix.SYS_GETTID, unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID, unix.SYS_GETEGID, unix.SYS_UNAME,
	unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_CLOCK_GETTIME, unix.SYS_GETTIMEOFDAY, unix.SYS_GETRANDOM,
	unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
}
