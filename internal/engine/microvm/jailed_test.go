package microvm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm/process"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/jail/jailtest"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

const mib = 1 << 20

// testJail is a jail with ids and groups of its own, apart from other tests.
type testJail struct {
	*jail.Jail
	folder, cgroup string
}

func openJail(t *testing.T) testJail {
	t.Helper()
	path, err := assets.Path(assets.VMM)
	if err != nil {
		t.Fatal(err)
	}
	j := testJail{folder: t.TempDir(), cgroup: jailtest.Cgroup(t)}
	j.Jail = jail.New(jail.Config{Program: path, Folder: j.folder, Cgroup: j.cgroup})
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j
}

// groups lists the jail's cgroups that match a pattern, in all hierarchies.
func (j testJail) groups(t *testing.T, pattern string) (all []string) {
	t.Helper()
	return jailtest.Groups(t, j.cgroup, pattern)
}

// bareMachine is a machine with the bare test guest, which runs on any KVM.
func bareMachine(t testing.TB) *bootMessage {
	t.Helper()
	f, err := assets.Open(assets.TestGuest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return newBoot(64*mib, 2, f)
}

func startBare(t *testing.T, j testJail) *process.Process {
	t.Helper()
	p, err := bareMachine(t).start(j.Jail, engine.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return p
}

// TestVMMIsJailed examines a vmm that runs a guest: every thread is locked down, it
// runs as a user without a name, and its limits are set.
func TestVMMIsJailed(t *testing.T) {
	j := openJail(t)
	p, other := startBare(t, j), startBare(t, j)
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.Pid()))
	if err != nil || len(threads) < 3 {
		t.Fatalf("%d threads, %v", len(threads), err)
	}
	uid := strconv.Itoa(p.Cell().UID())
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"Seccomp:\t2", "NoNewPrivs:\t1", "Uid:\t" + uid + "\t" + uid + "\t" + uid + "\t" + uid, "Groups:\t ",
			"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000",
		} {
			if !strings.Contains(string(b), "\n"+want+"\n") {
				t.Errorf("%s has no %q:\n%s", path, want, b)
			}
		}
	}
	if p.Cell().UID() == other.Cell().UID() {
		t.Errorf("two VMs have user id %s", uid)
	}
	usage, limit, err := p.Cell().Memory()
	if err != nil || limit != MemoryLimit(64*mib) || usage == 0 || usage > limit {
		t.Errorf("memory: %d of %d, %v", usage, limit, err)
	}
	if got := len(j.groups(t, "vm-"+uid)); got == 0 {
		t.Error("it has no cgroup")
	}
	isLimited(t, p.Pid(), 64*mib)
	own := ownMemory(t, p.Pid())
	t.Logf("private memory: %d KiB, charged: %d KiB", own>>10, usage>>10)
	if most := uint64(3 * mib / 2); own > most {
		t.Errorf("the vmm process has %d bytes of its own, more than %d", own, most)
	}
	for _, link := range []string{"mnt", "net", "ipc", "uts"} {
		read := func(pid string) string {
			target, err := os.Readlink("/proc/" + pid + "/ns/" + link)
			if err != nil {
				t.Fatal(err)
			}
			return target
		}
		if mine, its := read("self"), read(strconv.Itoa(p.Pid())); mine == its || its != read(strconv.Itoa(other.Pid())) {
			t.Errorf("the %s namespace: ours is %s, the vmms' %s and %s", link, mine, its, read(strconv.Itoa(other.Pid())))
		}
	}
}

// isLimited checks the limits that a vmm has set itself, and that the kernel kills it
// before this process when memory is short.
func isLimited(t *testing.T, pid int, maxFile uint64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil {
		t.Fatal(err)
	}
	limits := strings.Join(strings.Fields(string(b)), " ")
	for _, want := range []string{
		fmt.Sprintf("Max file size %d %d bytes", maxFile, maxFile), "Max open files 1024 1024 files", "Max core file size 1 1 bytes",
	} {
		if !strings.Contains(limits, want) {
			t.Errorf("no %q in its limits:\n%s", want, b)
		}
	}
	score, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
	if n, convErr := strconv.Atoi(strings.TrimSpace(string(score))); err != nil || convErr != nil || n < 500 {
		t.Errorf("its oom_score_adj is %q, %v", score, err)
	}
}

// ownMemory is the memory of a vmm process without its guest's RAM, which is its only
// large writable mapping.
func ownMemory(t *testing.T, pid int) (bytes uint64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		t.Fatal(err)
	}
	writable, ram := false, false
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kib, _ := strconv.ParseUint(fields[1], 10, 64) // 0 if it is not a number
		switch fields[0] {
		default:
			if strings.Contains(fields[0], "-") {
				writable = strings.HasPrefix(fields[1], "rw")
			}
		case "Size:":
			ram = writable && kib >= 64<<10
		case "Private_Clean:", "Private_Dirty:":
			if !ram {
				bytes += kib << 10
			}
		}
	}
	return bytes
}

// TestOutOfMemory: a vmm that the kernel kills for want of memory is reported as out
// of memory, through its cgroup, and leaves nothing behind.
func TestOutOfMemory(t *testing.T) {
	j := openJail(t)
	initrd, err := process.MemoryFile("initrd", bytes.Repeat([]byte{1}, 40*mib))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = initrd.Close() }()
	boot := &vmmctl.Boot{Memory: 128 * mib, VCPUs: 1, HasInitrd: true}
	p, err := process.Begin(j.Jail, jail.Limits{Memory: 20 * mib, MilliCPUs: 1000, Threads: 64}, &process.Message{Message: boot, Files: []*os.File{bareMachine(t).files[0], initrd}})
	if err == nil {
		p.Kill()
		t.Fatal("40 MiB were copied under a limit of 20")
	}
	if !strings.Contains(err.Error(), "out-of-memory: the kernel killed 1 in the cgroup") {
		t.Errorf("the error does not tell: %v", err)
	}
	if left := j.groups(t, "vm-*"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// traces counts the remains that VMs could leave in this process and on the machine.
type traces struct {
	files, goroutines, children int
	mounts                      string
}

func look(t *testing.T) traces {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var children int
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range tasks {
		if b, err := os.ReadFile(path); err == nil { // a thread may have ended
			children += len(strings.Fields(string(b)))
		}
	}
	return traces{len(fds), runtime.NumGoroutine(), children, string(mounts)}
}

// nothingLeft checks that VMs that have ended left nothing behind.
func (j testJail) nothingLeft(t *testing.T, before traces) {
	t.Helper()
	after := look(t)
	// The start of the last VM may still be setting its monitor's slack. Remains of
	// every VM would be far more.
	const few = 5
	if after.files > before.files+few || after.goroutines > before.goroutines+few || after.children != before.children || after.mounts != before.mounts {
		t.Errorf("before: %+v\nafter: %+v", before, after)
	}
	if left := j.groups(t, "vm-*"); len(left) > 0 {
		t.Errorf("cgroups: %q", left)
	}
	ids, err := os.ReadDir(j.folder)
	if err != nil || len(ids) > 0 {
		t.Errorf("user ids: %v, %v", ids, err)
	}
}

// TestNothingIsLeft makes and kills VMs and spares, and checks that they leave
// nothing behind.
func TestNothingIsLeft(t *testing.T) {
	j := openJail(t)
	startBare(t, j).Kill() // makes everything that is made only once
	snap := spareSnapshot(t, filepath.Join(t.TempDir(), "snapshot"))
	e := jailedEngine(t, j.Jail, residentFolder(t))
	machine := bareMachine(t)
	before := look(t)
	for i := range soak.Count(1000, 30) {
		p, err := machine.start(j.Jail, engine.Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if i%3 == 0 {
			if err := p.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-p.Done()
		} else {
			p.Kill()
		}
		sp, err := e.newSpare(t.Context(), snap)
		if err != nil {
			t.Fatal(err)
		}
		sp.Kill()
	}
	j.nothingLeft(t, before)
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// TestMachineLimits: the limits of a machine follow from its memory, vCPUs and
// devices.
func TestMachineLimits(t *testing.T) {
	onTmpfs, err := process.MemoryFile("disk", make([]byte, 3*mib))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = onTmpfs.Close() }()
	devices := &vmmctl.Devices{Disks: []vmmctl.Disk{{ReadOnly: true}, {}}}
	files := []*os.File{onTmpfs, onTmpfs}
	l, err := machineLimits(256*mib, 2, devices, files, engine.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if want := MemoryLimit(256*mib) + 3*mib; l.Memory != want {
		t.Errorf("memory %d, want %d: RAM, overhead, and what the guest writes to tmpfs", l.Memory, want)
	}
	if l.MilliCPUs != 3000 || l.Threads != threadsFixed+4 {
		t.Errorf("limits %+v", l)
	}
	for _, c := range []struct{ ram, disk, want uint64 }{
		{256 * mib, 3 * mib, 256 * mib}, {256 * mib, 300 * mib, 300 * mib}, {mib, 0, leastMaxFile},
	} {
		if got := maxFile(c.ram, []uint64{0, c.disk}); got != c.want {
			t.Errorf("files of %d bytes with %d bytes of RAM and a disk of %d, want %d", got, c.ram, c.disk, c.want)
		}
	}
	for i, want := range []uint64{0, 3 * mib} {
		if got, err := writableSize(&devices.Disks[i], files[i]); err != nil || got != want {
			t.Errorf("disk %d: %d bytes can be written, %v", i, got, err)
		}
	}
	if l, err = machineLimits(256*mib, 2, devices, files, engine.Limits{MilliCPUs: 250, Background: true}); err != nil || l.MilliCPUs != 250 || !l.Background {
		t.Errorf("limits %+v, %v", l, err)
	}
}

// TestNoMerging: the kernel does not merge pages of a vmm, even if it merges those of
// the daemon. Captures would miss merged pages.
func TestNoMerging(t *testing.T) {
	switch err := unix.Prctl(unix.PR_SET_MEMORY_MERGE, 1, 0, 0, 0); {
	case errors.Is(err, unix.EINVAL):
		t.Skip("this kernel merges no memory of whole processes")
	case err != nil:
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Prctl(unix.PR_SET_MEMORY_MERGE, 0, 0, 0, 0); err != nil {
			t.Error(err)
		}
	}()
	p := startBare(t, openJail(t))
	// The flags of the guest's memory are listed here.
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", p.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	flags, merged := 0, 0
	for line := range strings.Lines(string(maps)) {
		if f, ok := strings.CutPrefix(line, "VmFlags:"); ok {
			flags++
			if strings.Contains(f, " mg ") {
				merged++
			}
		}
	}
	if flags == 0 || merged > 0 {
		t.Errorf("%d of %d mappings of a vmm may be merged", merged, flags)
	}
}
