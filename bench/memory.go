package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Memory is the memory cost of a fork, in bytes.
type Memory struct {
	// Guest are the pages of the guest's RAM that it no longer shares with its
	// snapshot.
	Guest uint64 `json:"guest_bytes"`
	// Process is the private memory of the vmm process without the guest's RAM.
	// ProcessShare adds the process's share of memory that it has in common with
	// others (PSS), such as the program's text.
	Process      uint64 `json:"process_private_bytes"`
	ProcessShare uint64 `json:"process_pss_bytes"`
	// PageTables are the page tables of the process (VmPTE). Kernel includes them.
	PageTables uint64 `json:"page_tables_bytes"`
	// Kernel is how much the kernel's memory grew with the fork: that of the cgroup
	// if it is known, otherwise that of the whole machine.
	Kernel int64 `json:"kernel_bytes"`
}

// ReadMemory reads the memory of a vmm process whose guest has ram bytes of RAM. It
// leaves out Kernel, which cannot be read for one process.
func ReadMemory(pid int, ram uint64) (Memory, error) {
	m, mapped, err := processMemory(strconv.Itoa(pid))
	if err == nil && mapped != ram {
		err = fmt.Errorf("process %d maps %d bytes as guest memory, the guest has %d (with vm.overcommit_memory=2 it cannot be told apart)", pid, mapped, ram)
	}
	return m, err
}

// ownMemory is the memory of this process, with all the guests in it.
func ownMemory() (Memory, uint64, error) { return processMemory("self") }

func processMemory(process string) (m Memory, mapped uint64, err error) {
	folder := filepath.Join("/proc", process)
	smaps, err := os.Open(filepath.Join(folder, "smaps"))
	if err != nil {
		return m, 0, fmt.Errorf("read the memory of a process: %w", err)
	}
	defer func() { _ = smaps.Close() }() // only read
	if m, mapped, err = parseSmaps(smaps); err != nil {
		return m, 0, fmt.Errorf("%s: %w", smaps.Name(), err)
	}
	status, err := os.ReadFile(filepath.Join(folder, "status"))
	if err != nil {
		return m, 0, fmt.Errorf("read the memory of a process: %w", err)
	}
	m.PageTables, err = field(string(status), "VmPTE:")
	return m, mapped, err
}

// Anonymous is the memory of a process that belongs to no file and no other process,
// in bytes. Private memory would also count the pages of a file that only one process
// happens to map.
func Anonymous(pid int) (uint64, error) {
	path := filepath.Join("/proc", strconv.Itoa(pid), "smaps_rollup")
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read the memory of a process: %w", err)
	}
	n, err := field(string(b), "Anonymous:")
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

// perFork is how much each of the forks in one process has added to the process since
// begin. kernel is the growth of the kernel's memory for all forks.
func (m Memory) perFork(begin Memory, kernel int64, forks int) Memory {
	n := uint64(forks)
	each := func(now, then uint64) uint64 { return (max(now, then) - then) / n }
	return Memory{
		Guest: each(m.Guest, begin.Guest), Process: each(m.Process, begin.Process),
		ProcessShare: each(m.ProcessShare, begin.ProcessShare), PageTables: each(m.PageTables, begin.PageTables),
		Kernel: kernel / int64(forks),
	}
}

// mapping is an entry of /proc/PID/smaps, in bytes.
type mapping struct {
	size, private, share, anonymous uint64
	flags                           []string
}

// parseSmaps separates the guest's RAM from the rest, and returns how many bytes of
// it are mapped. The guest's RAM is the only memory mapped without a reservation of
// swap: guestmem maps it so. The Go runtime maps nothing else so but, since Linux
// 6.11, the droppable state of its random numbers.
func parseSmaps(r io.Reader) (m Memory, guest uint64, err error) {
	var at mapping
	add := func() {
		if slices.Contains(at.flags, "nr") && !slices.Contains(at.flags, "dp") {
			guest += at.size
			// Private memory would also count pages of the snapshot that just one
			// process maps.
			m.Guest += at.anonymous
		} else {
			m.Process += at.private
			m.ProcessShare += at.share
		}
		at = mapping{}
	}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		name, rest, ok := strings.Cut(lines.Text(), ":")
		if !ok || strings.Contains(name, " ") {
			continue // the line with the addresses
		}
		if name == "VmFlags" { // the last line of each mapping
			at.flags = strings.Fields(rest)
			add()
			continue
		}
		var to *uint64
		switch name {
		case "Size":
			to = &at.size
		case "Private_Clean", "Private_Dirty":
			to = &at.private
		case "Pss":
			to = &at.share
		case "Anonymous":
			to = &at.anonymous
		default:
			continue
		}
		n, err := kibibytes(rest)
		if err != nil {
			return m, 0, err
		}
		*to += n
	}
	return m, guest, lines.Err()
}

// kibibytes parses text like " 12 kB".
func kibibytes(s string) (uint64, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(s), "kB")), 10, 64)
	return n << 10, err
}

// field reads a number of kibibytes from a file of /proc, in bytes.
func field(text, name string) (uint64, error) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return kibibytes(rest)
		}
	}
	return 0, fmt.Errorf("there is no %s", name)
}

// kernelMemory reads the memory that the kernel uses for itself: slabs, stacks and
// page tables, including those of KVM.
type kernelMemory struct {
	// From says where the numbers come from.
	From string
	read func() (uint64, error)
}

// grown is the growth since an earlier reading.
func (k kernelMemory) grown(since uint64) (int64, error) {
	now, err := k.read()
	return int64(now) - int64(since), err
}

// newKernelMemory reads this process's cgroup, or else the whole machine.
func newKernelMemory() kernelMemory {
	if path, err := cgroupFile("memory.stat"); err == nil {
		k := kernelMemory{"cgroup", func() (uint64, error) { return cgroupKernel(path) }}
		if _, err := k.read(); err == nil {
			return k
		}
	}
	return kernelMemory{"machine", func() (uint64, error) {
		b, err := os.ReadFile("/proc/meminfo")
		if err != nil {
			return 0, err
		}
		return machineKernel(string(b))
	}}
}

// cgroupFile is the path of a file of this process's cgroup (v2).
func cgroupFile(name string) (string, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return filepath.Join("/sys/fs/cgroup", strings.TrimSpace(path), name), nil
		}
	}
	return "", errors.New("no cgroup of version 2")
}

// cgroupKernel reads the field kernel, which exists since Linux 5.18.
func cgroupKernel(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "kernel "); ok {
			return strconv.ParseUint(strings.TrimSpace(rest), 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no field kernel", path)
}

// machineKernel adds up the kernel's own memory in /proc/meminfo. Older kernels lack
// some of the fields.
func machineKernel(meminfo string) (sum uint64, err error) {
	for _, name := range []string{"Slab:", "KernelStack:", "PageTables:", "SecPageTables:", "Percpu:"} {
		n, err := field(meminfo, name)
		if err != nil && name == "Slab:" {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// medianMemory takes the median of each part, except for the kernel's growth. Of that
// it takes the mean, because the kernel's memory grows in steps.
func medianMemory(sample []Memory) (m Memory) {
	if len(sample) == 0 {
		return m
	}
	part := func(of func(Memory) uint64) uint64 {
		var s []uint64
		for _, x := range sample {
			s = append(s, of(x))
		}
		return Median(s)
	}
	m.Guest = part(func(x Memory) uint64 { return x.Guest })
	m.Process = part(func(x Memory) uint64 { return x.Process })
	m.ProcessShare = part(func(x Memory) uint64 { return x.ProcessShare })
	m.PageTables = part(func(x Memory) uint64 { return x.PageTables })
	for _, x := range sample {
		m.Kernel += x.Kernel
	}
	m.Kernel /= int64(len(sample))
	return m
}
