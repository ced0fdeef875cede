package doctor

import (
	"bufio"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"agentrun.dev/internal/host/assets"
)

func (h *host) exists(name string) bool {
	_, err := fs.Stat(h.Files, name)
	return err == nil
}

// read returns a file's text without leading and trailing white space.
func (h *host) read(name string) (string, error) {
	data, err := fs.ReadFile(h.Files, name)
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(data)), nil
}

func one(c Check) []Check { return []Check{c} }

func checkCPU(h *host) []Check {
	c := Check{Name: CheckCPU, Status: OK}
	if h.cpu.count == 0 {
		c.Status, c.Detail, c.Fix = Fail, "/proc/cpuinfo cannot be read", "mount /proc"
		return one(c)
	}
	c.Detail = fmt.Sprintf("%d × %s (%s)", h.cpu.count, h.cpu.model, h.cpu.vendor)
	switch {
	case !h.cpu.flags["lm"]:
		c.Status, c.Detail, c.Fix = Fail, c.Detail+": not a 64-bit x86 processor", "use an x86-64 host: AgentRun runs on no other yet"
	case h.cpu.vendor != "GenuineIntel" && h.cpu.vendor != "AuthenticAMD":
		c.Status, c.Detail, c.Fix = Warn, c.Detail+": neither Intel nor AMD", "run make test: this processor has not been tried"
	case !h.cpu.flags["constant_tsc"]:
		c.Status, c.Detail, c.Fix = Warn, c.Detail+": its time stamp counter may change speed (no constant_tsc)", "in a virtual machine, show it the host's processor (QEMU: -cpu host); guests may read their clocks slowly otherwise"
	}
	return one(c)
}

// oldKernel is the oldest Linux on which the project is tested.
var oldKernel = [2]int{5, 10}

func checkKernel(h *host) []Check {
	c := Check{Name: CheckKernel, Status: OK}
	release, err := h.read("proc/sys/kernel/osrelease")
	if err != nil {
		c.Status, c.Detail, c.Fix = Warn, "the kernel's version cannot be read", "mount /proc"
		return one(c)
	}
	c.Detail = "Linux " + release
	v, ok := parseVersion(release)
	switch {
	case !ok:
		c.Status, c.Fix = Warn, "make sure that it is 5.10 or newer: a number like 6.1 was expected"
	case slices.Compare(v[:], oldKernel[:]) < 0:
		c.Status = Warn
		c.Detail += fmt.Sprintf(" is older than %d.%d", oldKernel[0], oldKernel[1])
		c.Fix = "boot a newer kernel"
	case slices.Compare(v[:], mapsAhead[:]) < 0:
		c.Detail += fmt.Sprintf(" (forks of microVMs are faster from %d.%d on, whose KVM maps memory ahead)", mapsAhead[0], mapsAhead[1])
	}
	return one(c)
}

// mapsAhead is the first Linux with KVM_PRE_FAULT_MEMORY. With it a fork has no
// page faults for memory that it is known to touch.
var mapsAhead = [2]int{6, 11}

// parseVersion takes the first two numbers of a release like 6.1.0-18-amd64.
func parseVersion(release string) (v [2]int, ok bool) {
	parts := strings.SplitN(release, ".", 3)
	if len(parts) < 2 {
		return v, false
	}
	for i := range v {
		digits := parts[i]
		if end := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
			digits = digits[:end]
		}
		n, err := strconv.Atoi(digits)
		if err != nil {
			return v, false
		}
		v[i] = n
	}
	return v, true
}

// Features of UFFDIO_API (linux/uapi/linux/userfaultfd.h) that are needed to
// write-protect a guest's memory.
const (
	uffdPagefaultWP = 1 << 0
	uffdShmemWP     = 1 << 12
)

// checkJail builds a jail, because only the attempt shows whether all of it
// works.
func checkJail(h *host) []Check {
	c := Check{Name: CheckJail, Status: OK, Detail: "user ids, namespaces, an empty root and limits of their own for microVMs"}
	if err := h.Probes.Jail(); err != nil {
		c.Status, c.Detail = Fail, err.Error()
		c.Fix = "run as root, on a machine or in a container that may mount and make namespaces; or start sandboxes with --allow-unlimited or --allow-unjailed"
	}
	return one(c)
}

// checkDiskLimits reports how --io-bytes and --io-ops are enforced for
// microVMs. Token buckets always enforce them, so the check is OK without
// cgroups, too.
func checkDiskLimits(h *host) []Check {
	c := Check{Name: CheckDiskLimits, Status: OK}
	if device, err := h.Probes.DiskLimits(h.StateFolder); err != nil {
		c.Detail = fmt.Sprintf("token buckets in virtio-blk alone; cgroup io adds nothing in %s: %v", h.StateFolder, err)
	} else {
		c.Detail = fmt.Sprintf("token buckets in virtio-blk, and cgroup io for device %s, which holds %s", device, h.StateFolder)
	}
	return one(c)
}

// forksStandStill is the disadvantage of a host without userfaultfd.
const forksStandStill = "a running sandbox stands still while a fork copies its memory"

func checkUserfaultfd(h *host) []Check {
	c := Check{Name: CheckUserfaultfd, Status: OK}
	var ways []string
	if h.exists("dev/userfaultfd") {
		ways = append(ways, "/dev/userfaultfd is there")
	}
	if v, err := h.read("proc/sys/vm/unprivileged_userfaultfd"); err == nil {
		ways = append(ways, "vm.unprivileged_userfaultfd="+v)
	}
	features, err := h.Probes.Userfaultfd()
	switch {
	case err != nil:
		c.Status = Warn
		c.Detail = fmt.Sprintf("cannot be used by this user: %v", err)
		c.Fix = "run as root, or open /dev/userfaultfd (Linux 6.1 and later) to this user's group; until then " + forksStandStill
	case features&uffdPagefaultWP == 0 || features&uffdShmemWP == 0:
		c.Status = Warn
		c.Detail = fmt.Sprintf("without write protection of shared memory (features %#x)", features)
		c.Fix = "boot Linux 6.1 or later; until then " + forksStandStill
	case !h.exists("dev/userfaultfd"):
		c.Status = Warn
		c.Detail = "with write protection, but there is no /dev/userfaultfd to hand to a microVM"
		c.Fix = "boot Linux 6.1 or later, or give this container the device; until then " + forksStandStill
	default:
		c.Detail = "with write protection"
	}
	if len(ways) > 0 {
		c.Detail += " (" + strings.Join(ways, ", ") + ")"
	}
	return one(c)
}

func checkMemfd(h *host) []Check {
	c := Check{Name: CheckMemfd, Status: OK, Detail: "files in memory can be made and sealed"}
	if err := h.Probes.Memfd(); err != nil {
		c.Status, c.Detail, c.Fix = Fail, fmt.Sprintf("no sealed files in memory: %v", err), "allow memfd_create (a container's seccomp profile may forbid it)"
	}
	return one(c)
}

const (
	mib = 1 << 20
	gib = 1 << 30

	// A guest of the minimum size and its vmm fit into memoryNeeded.
	memoryNeeded  = 128 * mib
	memoryAdvised = 1 * gib
	// The kernel's source tree and object files need most of diskAdvised, once.
	diskNeeded  = 256 * mib
	diskAdvised = 4 * gib
)

func checkMemory(h *host) []Check {
	c := Check{Name: CheckMemory, Status: OK}
	total, err := h.meminfo("MemTotal")
	available, err2 := h.meminfo("MemAvailable")
	if err != nil || err2 != nil {
		c.Status, c.Detail, c.Fix = Warn, "/proc/meminfo cannot be read", "mount /proc"
		return one(c)
	}
	c.Detail = fmt.Sprintf("%s of %s available", bytes(available), bytes(total))
	switch {
	case available < memoryNeeded:
		c.Status, c.Fix = Fail, "free some: the smallest guest needs "+bytes(memoryNeeded)
	case available < memoryAdvised:
		c.Status, c.Fix = Warn, "free some: "+bytes(memoryAdvised)+" leave room for a few guests"
	}
	return one(c)
}

// meminfo returns a line of /proc/meminfo in bytes.
func (h *host) meminfo(key string) (uint64, error) {
	text, err := h.read("proc/meminfo")
	if err != nil {
		return 0, err
	}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) >= 2 && fields[0] == key+":" {
			kib, err := strconv.ParseUint(fields[1], 10, 54)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no %s in /proc/meminfo", key)
}

func checkDisk(h *host) []Check {
	c := Check{Name: CheckDisk, Status: OK}
	free, err := h.Probes.Disk(h.CacheFolder)
	if err != nil {
		c.Status, c.Detail, c.Fix = Warn, fmt.Sprintf("the cache folder cannot be looked at: %v", err), "set AGENTRUN_CACHE to a folder that can be written"
		return one(c)
	}
	c.Detail = fmt.Sprintf("%s free in %s", bytes(free), h.CacheFolder)
	fix := "free some, or set AGENTRUN_CACHE to a folder on a larger disk"
	switch {
	case free < diskNeeded:
		c.Status, c.Fix = Fail, fix
	case free < diskAdvised:
		c.Status, c.Fix = Warn, fix+": building the guest kernel takes up to "+bytes(diskAdvised)
	}
	return one(c)
}

// bytes formats a number of bytes for people.
func bytes(n uint64) string {
	if n >= gib {
		return fmt.Sprintf("%.1f GiB", float64(n)/gib)
	}
	return fmt.Sprintf("%d MiB", n/mib)
}

func checkAssets(h *host) []Check {
	c := Check{Name: CheckAssets, Status: OK}
	var found, missing []string
	for _, a := range []assets.Asset{assets.Kernel, assets.GuestAgent, assets.VMM} {
		if p, err := h.Probes.Asset(a); err != nil {
			missing = append(missing, string(a))
		} else {
			found = append(found, p)
		}
	}
	if len(missing) > 0 {
		c.Status = Fail
		c.Detail = "missing: " + strings.Join(missing, ", ")
		c.Fix = "run make build, or set " + assets.EnvFolder + " to the folder that has them"
		return one(c)
	}
	c.Detail = fmt.Sprintf("%s, %s and %s in %s", assets.Kernel, assets.GuestAgent, assets.VMM, path.Dir(found[0]))
	return one(c)
}

func checkTools(h *host) []Check {
	c := Check{Name: CheckTools, Status: OK}
	p, err := h.Probes.LookPath("mkfs.erofs")
	if err != nil {
		c.Status, c.Detail, c.Fix = Fail, "missing: mkfs.erofs, which packs root filesystems", "sudo apt-get install erofs-utils"
		return one(c)
	}
	c.Detail = p
	for _, name := range []string{"mke2fs", "/usr/sbin/mke2fs", "/sbin/mke2fs"} {
		if p, err := h.Probes.LookPath(name); err == nil {
			c.Detail += ", " + p
			return one(c)
		}
	}
	c.Status, c.Detail = Warn, "missing: mke2fs, which formats the disks of microVMs; templates with resources.disk fail without"
	c.Fix = "sudo apt-get install e2fsprogs"
	return one(c)
}

// checkGVisor checks the requirements of sandboxes on gVisor. It warns at most,
// because microVMs do not need them.
func checkGVisor(h *host) []Check {
	c := Check{Name: CheckGVisor, Status: Warn}
	for _, a := range []assets.Asset{assets.GVisorHelper, assets.GuestAgent} {
		if _, err := h.Probes.Asset(a); err != nil {
			c.Detail, c.Fix = "missing: "+string(a), "run make build, or set "+assets.EnvFolder+" to the folder that has it"
			return one(c)
		}
	}
	if !h.Probes.Root() {
		c.Detail, c.Fix = "only root can build a sandbox's walls", "run as root"
		return one(c)
	}
	c.Status = OK
	c.Detail = "can be used; it carries no extended attributes, so files lose their capabilities, and its disks are in memory"
	return one(c)
}
