package lockdown

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// call is a system call as the filter sees it.
type call struct {
	arch   uint32
	number uint32
	args   [6]uint64
}

// run interprets a program as the kernel does.
func run(t *testing.T, program []unix.SockFilter, c call) uint32 {
	t.Helper()
	word := func(offset uint32) uint32 {
		switch {
		case offset == offNumber:
			return c.number
		case offset == offArch:
			return c.arch
		case offset >= 16 && offset < 64 && offset%4 == 0:
			return uint32(c.args[(offset-16)/8] >> (offset % 8 * 8))
		}
		t.Fatalf("load from offset %d", offset)
		return 0
	}
	accumulator := uint32(0)
	for at := 0; at < len(program); at++ {
		i := program[at]
		holds := false
		switch i.Code {
		case opLoad:
			accumulator = word(i.K)
			continue
		case opReturn:
			return i.K
		case opAlways:
			at += int(i.K)
			continue
		case opAtLeast:
			holds = accumulator >= i.K
		case opEqual:
			holds = accumulator == i.K
		case opAnySet:
			holds = accumulator&i.K != 0
		default:
			t.Fatalf("instruction %#x", i.Code)
		}
		if holds {
			at += int(i.Jt)
		} else {
			at += int(i.Jf)
		}
	}
	t.Fatal("the program ran off its end")
	return 0
}

func TestFilter(t *testing.T) {
	const pid = 4711
	program, err := assemble(vmmRules(pid, []uint32{0xae80, 0xae41}))
	if err != nil {
		t.Fatal(err)
	}
	x64 := func(number uintptr, args ...uint64) call {
		c := call{arch: unix.AUDIT_ARCH_X86_64, number: uint32(number)}
		copy(c.args[:], args)
		return c
	}
	for _, number := range slices.Concat(always, runtimeCalls) {
		if got := run(t, program, x64(number, 1<<63, 1<<63)); got != retAllow {
			t.Errorf("system call %d: %#x", number, got)
		}
	}
	for name, tt := range map[string]struct {
		call
		want uint32
	}{
		"KVM_RUN":               {x64(unix.SYS_IOCTL, 9, 0xae80), retAllow},
		"another ioctl":         {x64(unix.SYS_IOCTL, 9, 0xae81), retKill},
		"an ioctl's upper half": {x64(unix.SYS_IOCTL, 9, 1<<32|0xae41), retAllow}, // the kernel ignores it
		"data":                  {x64(unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_WRITE), retAllow},
		"memory":                {x64(unix.SYS_MMAP, 0, 4096, unix.PROT_READ, unix.MAP_SHARED|unix.MAP_FIXED|unix.MAP_NORESERVE), retAllow},
		"random numbers":        {x64(unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANONYMOUS|0x8), retAllow}, // MAP_DROPPABLE
		"huge pages":            {x64(unix.SYS_MMAP, 0, 4096, unix.PROT_READ, unix.MAP_ANONYMOUS|unix.MAP_HUGETLB), retKill},
		"locked memory":         {x64(unix.SYS_MMAP, 0, 4096, unix.PROT_READ, unix.MAP_ANONYMOUS|unix.MAP_LOCKED), retKill},
		"free memory":           {x64(unix.SYS_MADVISE, 0, 4096, unix.MADV_DONTNEED), retAllow},
		"merge memory":          {x64(unix.SYS_MADVISE, 0, 4096, unix.MADV_MERGEABLE), retKill},
		"wait":                  {x64(unix.SYS_FUTEX, 0, futexWaitPrivate), retAllow},
		"wake":                  {x64(unix.SYS_FUTEX, 0, futexWakePrivate), retAllow},
		"wake others":           {x64(unix.SYS_FUTEX, 0, 1), retKill},
		"requeue":               {x64(unix.SYS_FUTEX, 0, 3|128), retKill},
		"allocate":              {x64(unix.SYS_FALLOCATE, 9, 0), retAllow},
		"punch":                 {x64(unix.SYS_FALLOCATE, 9, 3), retAllow},
		"allocate beyond":       {x64(unix.SYS_FALLOCATE, 9, unix.FALLOC_FL_KEEP_SIZE), retKill},
		"zero":                  {x64(unix.SYS_FALLOCATE, 9, unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE), retKill},
		"its own files":         {x64(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_FSIZE), retAllow},
		"another's files":       {x64(unix.SYS_PRLIMIT64, pid, unix.RLIMIT_FSIZE), retKill},
		"another limit":         {x64(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE), retKill},
		"send":                  {x64(unix.SYS_SENDMSG, 3), retKill},
		"code":                  {x64(unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_EXEC), retKill},
		"to code":               {x64(unix.SYS_MPROTECT, 0, 4096, unix.PROT_EXEC), retKill},
		"a thread":              {x64(unix.SYS_CLONE, threadFlags), retAllow},
		"a process":             {x64(unix.SYS_CLONE, uint64(unix.SIGCHLD)), retKill},
		"a thread with more":    {x64(unix.SYS_CLONE, threadFlags|unix.CLONE_NEWUSER), retKill},
		"clone3":                {x64(unix.SYS_CLONE3), retNoSuch},
		"its own thread":        {x64(unix.SYS_TGKILL, pid, 1, 23), retAllow},
		"another's thread":      {x64(unix.SYS_TGKILL, pid+1, 1, 23), retKill},
		"flags":                 {x64(unix.SYS_FCNTL, 3, unix.F_GETFL), retAllow},
		"a lock":                {x64(unix.SYS_FCNTL, 3, unix.F_OFD_SETLK), retKill},
		"a name":                {x64(unix.SYS_PRCTL, unix.PR_SET_VMA), retAllow},
		"another prctl":         {x64(unix.SYS_PRCTL, unix.PR_SET_DUMPABLE), retKill},
		"its own slices":        {x64(unix.SYS_SCHED_SETATTR, 0), retAllow},
		"another's slices":      {x64(unix.SYS_SCHED_SETATTR, pid), retKill},
		"open":                  {x64(unix.SYS_OPENAT), retKill},
		"execve":                {x64(unix.SYS_EXECVE), retKill},
		"x32":                   {x64(0x4000_0000 | unix.SYS_READ), retKill},
		"32 bits":               {call{arch: unix.AUDIT_ARCH_I386, number: unix.SYS_READ}, retKill},
	} {
		if got := run(t, program, tt.call); got != tt.want {
			t.Errorf("%s: %#x, want %#x", name, got, tt.want)
		}
	}
}

// TestFilterKnowsNoOthers: a number without a rule kills, wherever it lies
// between the numbers with rules.
func TestFilterKnowsNoOthers(t *testing.T) {
	program, err := assemble(vmmRules(1, []uint32{1}))
	if err != nil {
		t.Fatal(err)
	}
	rules := map[uintptr]bool{
		unix.SYS_IOCTL: true, unix.SYS_MMAP: true, unix.SYS_MPROTECT: true, unix.SYS_CLONE: true,
		unix.SYS_CLONE3: true, unix.SYS_TGKILL: true, unix.SYS_FCNTL: true, unix.SYS_PRCTL: true,
		unix.SYS_SCHED_SETATTR: true, unix.SYS_MADVISE: true, unix.SYS_FUTEX: true, unix.SYS_FALLOCATE: true,
		unix.SYS_PRLIMIT64: true,
	}
	for _, number := range slices.Concat(always, runtimeCalls) {
		rules[number] = true
	}
	for number := range uintptr(1024) {
		got := run(t, program, call{arch: unix.AUDIT_ARCH_X86_64, number: uint32(number)})
		if !rules[number] && got != retKill {
			t.Errorf("system call %d: %#x", number, got)
		}
	}
	if got := run(t, program, call{arch: unix.AUDIT_ARCH_X86_64, number: 1<<32 - 1}); got != retKill {
		t.Errorf("the last number: %#x", got)
	}
}

// TestRuleTooLong: a jump that is too long must not wrap around.
func TestRuleTooLong(t *testing.T) {
	if _, err := assemble(vmmRules(1, make([]uint32, 127))); err == nil {
		t.Error("a rule of 256 instructions was accepted")
	}
	if _, err := assemble(vmmRules(1, make([]uint32, 126))); err != nil {
		t.Error(err)
	}
}
