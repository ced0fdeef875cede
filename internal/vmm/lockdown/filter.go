package lockdown

import (
	"cmp"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data: the system call's number, the architecture,
// and the low half of an argument on a little-endian machine.
const (
	offNumber = 0
	offArch   = 4
)

func offArg(i int) uint32 { return uint32(16 + 8*i) }

// Instructions of classic BPF, those that a filter needs.
const (
	opLoad    = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	opEqual   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	opAtLeast = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	opAlways  = unix.BPF_JMP | unix.BPF_JA
	opAnySet  = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	opReturn  = unix.BPF_RET | unix.BPF_K
	retAllow  = unix.SECCOMP_RET_ALLOW
	retKill   = unix.SECCOMP_RET_KILL_PROCESS
	retNoSuch = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
)

func load(offset uint32) unix.SockFilter { return unix.SockFilter{Code: opLoad, K: offset} }
func ret(action uint32) unix.SockFilter  { return unix.SockFilter{Code: opReturn, K: action} }

// jump continues with the next instruction if the test holds; otherwise it
// skips as many instructions as skip says.
func jump(op uint16, k uint32, skip int) unix.SockFilter {
	return unix.SockFilter{Code: op, K: k, Jf: uint8(skip)}
}

// rule decides about a system call. Its block ends the program on every path,
// because it may have loaded an argument over the call's number.
type rule struct {
	number uintptr
	block  []unix.SockFilter
}

func allow(number uintptr) rule { return rule{number, []unix.SockFilter{ret(retAllow)}} }

// allowValues allows a call if the low half of an argument has one of these
// values. The kernel must ignore the high half of the argument.
func allowValues(number uintptr, arg int, values ...uint32) rule {
	block := []unix.SockFilter{load(offArg(arg))}
	for _, v := range values {
		block = append(block, jump(opEqual, v, 1), ret(retAllow))
	}
	return rule{number, append(block, ret(retKill))}
}

// allowWithout allows a call if none of these bits is set in an argument.
func allowWithout(number uintptr, arg int, bits uint32) rule {
	return rule{number, []unix.SockFilter{
		load(offArg(arg)), jump(opAnySet, bits, 1), ret(retKill), ret(retAllow),
	}}
}

// condition is a test of the low half of an argument. The kernel must ignore
// the high half.
type condition struct {
	arg    int
	values []uint32 // it is one of these values; without values,
	bits   uint32   // none of these is set
}

// allowIf allows a call if all conditions hold.
func allowIf(number uintptr, all ...condition) rule {
	var block []unix.SockFilter
	for _, c := range all {
		block = append(block, load(offArg(c.arg)))
		for i, v := range c.values {
			// Jump over the remaining tests and over the kill at the end.
			block = append(block, unix.SockFilter{Code: opEqual, K: v, Jt: uint8(len(c.values) - i)})
		}
		if len(c.values) == 0 {
			block = append(block, jump(opAnySet, c.bits, 1))
		}
		block = append(block, ret(retKill))
	}
	return rule{number, append(block, ret(retAllow))}
}

// assemble makes one program of rules, one for each system call. When the
// program is installed, the kernel runs it once for every number, to find out
// which calls it always allows. So the program uses binary search.
func assemble(rules []rule) ([]unix.SockFilter, error) {
	rules = slices.Clone(rules)
	slices.SortFunc(rules, func(a, b rule) int { return cmp.Compare(a.number, b.number) })
	for _, r := range rules {
		if len(r.block) > maxSkip {
			return nil, fmt.Errorf("the rule of system call %d has %d instructions, at most %d can be skipped", r.number, len(r.block), maxSkip)
		}
	}
	p := []unix.SockFilter{
		load(offArch), {Code: opEqual, K: unix.AUDIT_ARCH_X86_64, Jt: 1}, ret(retKill),
		load(offNumber),
	}
	return append(p, search(rules)...), nil
}

// fewRules is how many rules are tried one after the other.
const fewRules = 3

// search finds the rule for the loaded number, and kills if there is no such
// rule.
func search(rules []rule) (p []unix.SockFilter) {
	if len(rules) > fewRules {
		half := len(rules) / 2
		below := search(rules[:half])
		p = append(p,
			jump(opAtLeast, uint32(rules[half].number), 1),
			// A conditional jump would be too short.
			unix.SockFilter{Code: opAlways, K: uint32(len(below))})
		return append(append(p, below...), search(rules[half:])...)
	}
	for _, r := range rules {
		p = append(p, jump(opEqual, uint32(r.number), len(r.block)))
		p = append(p, r.block...)
	}
	return append(p, ret(retKill))
}

// maxSkip is the length of the longest conditional jump.
const maxSkip = 255

// allowAny allows a call if all conditions of one of these alternatives hold.
func allowAny(number uintptr, alternatives ...[]condition) rule {
	var block []unix.SockFilter
	for _, all := range alternatives {
		var one []unix.SockFilter
		var failures []int // jumps past this alternative, whose length is known at its end
		for _, c := range all {
			one = append(one, load(offArg(c.arg)))
			for i, v := range c.values {
				one = append(one, unix.SockFilter{Code: opEqual, K: v, Jt: uint8(len(c.values) - i)})
			}
			if len(c.values) == 0 {
				one = append(one, unix.SockFilter{Code: opAnySet, K: c.bits, Jf: 1})
			}
			failures = append(failures, len(one))
			one = append(one, unix.SockFilter{Code: opAlways})
		}
		one = append(one, ret(retAllow))
		for _, at := range failures {
			one[at].K = uint32(len(one) - at - 1)
		}
		block = append(block, one...)
	}
	return rule{number, append(block, ret(retKill))}
}
