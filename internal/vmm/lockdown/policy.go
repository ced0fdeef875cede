package lockdown

import "golang.org/x/sys/unix"

// threadFlags are the flags with which the Go runtime makes a thread
// (runtime/os_linux.go and, for the last flag, sys_linux_amd64.s). With other
// flags clone would make another process, or a thread in new namespaces.
const threadFlags = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND |
	unix.CLONE_SYSVSEM | unix.CLONE_THREAD | unix.CLONE_SETTLS

// noMap are flags of mmap that a vmm does not use. A list of the allowed flags is
// not possible: the kernel itself tells the Go runtime some of them, and they
// depend on the kernel's version (vgetrandom).
const noMap = unix.MAP_HUGETLB | unix.MAP_LOCKED | unix.MAP_GROWSDOWN

// advice lists the values of madvise that the Go runtime and guest memory use.
var advice = []uint32{
	unix.MADV_DONTNEED, unix.MADV_FREE, unix.MADV_HUGEPAGE, unix.MADV_NOHUGEPAGE, unix.MADV_COLLAPSE,
	unix.MADV_POPULATE_READ, unix.MADV_POPULATE_WRITE,
}

// Operations of futex(2), with FUTEX_PRIVATE_FLAG.
const (
	futexWaitPrivate = 0 | 128
	futexWakePrivate = 1 | 128
)

// vmmRules returns the rules for a vmm process with this id. The kernel
// remembers which calls are always allowed and does not run the program for
// them.
func vmmRules(pid int, ioctls []uint32) []rule {
	rules := append(runtimeRules(pid),
		allowValues(unix.SYS_IOCTL, 1, ioctls...),
		// Only for the calling thread, and it cannot raise its priority: the
		// thread that answers a guest's faults asks for short slices.
		allowValues(unix.SYS_SCHED_SETATTR, 0, 0),
		// To allocate, or to punch a hole. With KEEP_SIZE alone, ext4 would
		// allocate beyond the limit of the file size.
		allowValues(unix.SYS_FALLOCATE, 1, 0, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE),
		// The process's own limit of the file size, which it can only lower
		// (LimitFileSize).
		allowIf(unix.SYS_PRLIMIT64, condition{arg: 0, values: []uint32{0}}, condition{arg: 1, values: []uint32{unix.RLIMIT_FSIZE}}),
	)
	for _, number := range always {
		rules = append(rules, allow(number))
	}
	return rules
}

// runtimeRules returns the rules for every Go program with this process id.
func runtimeRules(pid int) []rule {
	rules := []rule{
		// Only code that was in the binary can be executed. Huge pages
		// (MAP_HUGETLB) are forbidden because the host has reserved them for other
		// programs, and no cgroup limit of the process's memory counts them.
		allowIf(unix.SYS_MMAP, condition{arg: 2, bits: unix.PROT_EXEC}, condition{arg: 3, bits: noMap}),
		allowWithout(unix.SYS_MPROTECT, 2, unix.PROT_EXEC),
		allowValues(unix.SYS_CLONE, 0, threadFlags),
		// Its flags are in memory, which a filter cannot read. When it fails,
		// callers use clone.
		{unix.SYS_CLONE3, []unix.SockFilter{ret(retNoSuch)}},
		// Only to its own threads: vCPUs are kicked, goroutines preempted.
		allowValues(unix.SYS_TGKILL, 0, uint32(pid)),
		// No locks, no leases, no owners.
		allowValues(unix.SYS_FCNTL, 1, unix.F_GETFL, unix.F_SETFL, unix.F_GETFD, unix.F_SETFD, unix.F_DUPFD_CLOEXEC),
		// Not MADV_MERGEABLE: from the duration of a write, a process could find
		// out which pages other processes have.
		allowValues(unix.SYS_MADVISE, 2, advice...),
		// Only the operations with which the Go runtime waits, within the process.
		// The kernel has had its bugs in the other operations (requeueing, priority
		// inheritance).
		allowValues(unix.SYS_FUTEX, 1, futexWaitPrivate, futexWakePrivate),
		// The runtime names its mappings.
		allowValues(unix.SYS_PRCTL, 0, unix.PR_SET_VMA),
	}
	for _, number := range runtimeCalls {
		rules = append(rules, allow(number))
	}
	return rules
}

// always are the calls of a vmm that are allowed with any arguments: they act on
// descriptors that it was given.
var always = []uintptr{
	unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_PREADV, unix.SYS_PWRITEV,
	unix.SYS_LSEEK, unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_FTRUNCATE,
	// Existing connected sockets, and no new ones. The process sends with write:
	// sendmsg could pass descriptors on, and name another receiver in memory
	// that a filter cannot read.
	unix.SYS_RECVMSG, unix.SYS_ACCEPT4, unix.SYS_SHUTDOWN,
}

// runtimeCalls are the calls of every Go program that are allowed with any
// arguments: they act on memory, on descriptors that the process was given, or on
// the process itself.
var runtimeCalls = []uintptr{
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_CLOSE, unix.SYS_FSTAT,
	// Waiting.
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2,
	unix.SYS_POLL, unix.SYS_PPOLL, unix.SYS_NANOSLEEP, unix.SYS_RESTART_SYSCALL,
	// Memory.
	unix.SYS_MUNMAP, unix.SYS_BRK,
	// Threads, signals, time, random numbers.
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK,
	unix.SYS_GETPID, unix.SYS_GETTID, unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY,
	unix.SYS_CLOCK_GETTIME, unix.SYS_GETRANDOM,
	unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
}

// Userfaultfd lists the requests that write-protect memory while its guest runs
// (linux/userfaultfd.h, and PAGEMAP_SCAN of linux/fs.h).
var Userfaultfd = []uint32{
	0x0000_aa00, // USERFAULTFD_IOC_NEW
	0xc018_aa3f, // UFFDIO_API
	0xc020_aa00, // UFFDIO_REGISTER
	0x8010_aa01, // UFFDIO_UNREGISTER
	0x8010_aa02, // UFFDIO_WAKE
	0xc018_aa06, // UFFDIO_WRITEPROTECT
	0xc060_6610, // PAGEMAP_SCAN
}
