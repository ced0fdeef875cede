package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/jail/jailtest"
	"golang.org/x/sys/unix"
)

const mib = 1 << 20

var roomy = Limits{Memory: 256 * mib, MilliCPUs: 2000, Threads: 64}

// config configures a jail for the escapee. It has ids and groups of its own,
// so that tests do not disturb each other.
func config(t *testing.T) Config {
	t.Helper()
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	return Config{Program: filepath.Join(folder, "escapee"), Folder: t.TempDir(), Cgroup: jailtest.Cgroup(t)}
}

func open(t *testing.T, cfg Config) *Jail {
	t.Helper()
	j := New(cfg)
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j
}

// inmate is a jailed process of a test.
type inmate struct {
	*Process
	control, stderr *os.File
}

func start(t *testing.T, j *Jail, l Limits) *inmate {
	t.Helper()
	// Blocking: both ends share the mode of the escapee's end.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "control"), os.NewFile(uintptr(fds[1]), "control")
	stderr, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := j.Start(l, theirs, stderr)
	if err != nil {
		t.Fatal(err)
	}
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = ours.Close(), stderr.Close() })
	return &inmate{p, ours, stderr}
}

// order tells the process what to do.
func (i *inmate) order(t *testing.T, do string, victim, bytes int) {
	t.Helper()
	i.orderWith(t, map[string]any{"Do": do, "Victim": victim, "Bytes": bytes})
}

// orderWith is order with more fields and files.
func (i *inmate) orderWith(t *testing.T, what map[string]any, files ...*os.File) {
	t.Helper()
	b, err := json.Marshal(what)
	if err != nil {
		t.Fatal(err)
	}
	var rights []byte
	for _, f := range files {
		rights = append(rights, unix.UnixRights(int(f.Fd()))...)
	}
	if err := unix.Sendmsg(int(i.control.Fd()), b, rights, nil, 0); err != nil {
		t.Fatal(err)
	}
}

// answer returns the answer of the process, or "" if the process ended before.
func (i *inmate) answer(t *testing.T) string {
	t.Helper()
	b := make([]byte, 4096)
	n, err := i.control.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return string(b[:n])
}

// end waits for the process or kills it, and frees its cell.
func (i *inmate) end(t *testing.T, kill bool) (syscall.WaitStatus, uint64) {
	t.Helper()
	if kill {
		if err := i.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	state, err := i.Wait()
	if err != nil {
		t.Fatal(err)
	}
	oom, err := i.Cell.Release()
	if err != nil {
		t.Fatal(err)
	}
	return state.Sys().(syscall.WaitStatus), oom
}

func (i *inmate) said(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(i.stderr.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestLockedDownWorks: a locked down process can do all that a Go program
// needs.
func TestLockedDownWorks(t *testing.T) {
	j := open(t, config(t))
	p := start(t, j, roomy)
	p.order(t, "threads", 0, 0)
	if said := p.answer(t); said != `"ok"` {
		t.Errorf("threads: %q, stderr %q", said, p.said(t))
	}
	p.end(t, true)
	p = start(t, j, roomy)
	p.order(t, "panic", 0, 0)
	status, _ := p.end(t, false)
	if said := p.said(t); status.ExitStatus() != 2 || !strings.Contains(said, "a word at the end") || !strings.Contains(said, "goroutine ") {
		t.Errorf("a panic ended with %#x and said %q", status, said)
	}
}

// TestPagemapHidesAddresses: the page map tells which pages exist, but not
// their physical addresses.
func TestPagemapHidesAddresses(t *testing.T) {
	j := open(t, config(t))
	p := start(t, j, roomy)
	defer p.end(t, true)
	p.order(t, "report and hold", 0, 0)
	if said := p.answer(t); said == "" { // before its answer its pages may not exist
		t.Fatal(p.said(t))
	}
	pagemap, err := OpenPagemap(p.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pagemap.Close() }()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.Pid))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(maps), "-")
	address, err := strconv.ParseUint(first, 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	var entry [8]byte
	present := false
	for page := range uint64(64) {
		if _, err := pagemap.ReadAt(entry[:], int64((address>>12+page)*8)); err != nil {
			t.Fatal(err)
		}
		if entry[7]&0x80 == 0 {
			continue
		}
		present = true
		if frame := [7]byte(entry[:7]); frame[0]|frame[1]|frame[2]|frame[3]|frame[4]|frame[5] != 0 {
			t.Fatalf("the page map tells a physical address: %x", entry)
		}
	}
	if !present {
		t.Error("no page of the program is present: this tested nothing")
	}
}

// TestOOM: a process that uses more than its limit is killed, and Release
// reports the reason.
func TestOOM(t *testing.T) {
	j := open(t, config(t))
	p := start(t, j, Limits{Memory: 32 * mib, MilliCPUs: 1000, Threads: 64})
	usage, limit, err := p.Cell.Memory()
	if err != nil || limit != 32*mib || usage > limit {
		t.Errorf("usage %d of %d, %v", usage, limit, err)
	}
	p.order(t, "fill", 0, 64*mib)
	if said := p.answer(t); said != "" {
		t.Errorf("64 MiB were filled under a limit of 32: %s", said)
	}
	if status, kills := p.end(t, false); status.Signal() != unix.SIGKILL || kills == 0 {
		t.Errorf("it ended with %#x, %d kills", status, kills)
	}
	// A process within its limit lives, and so does one whose limit was
	// extended.
	for _, extend := range []bool{false, true} {
		p = start(t, j, Limits{Memory: 48 * mib, MilliCPUs: 1000, Threads: 64})
		bytes := 24 * mib
		back := func() error { return nil }
		if extend {
			bytes = 64 * mib
			if back, err = p.Cell.Extend(64 * mib); err != nil {
				t.Fatal(err)
			}
		}
		p.order(t, "fill", 0, bytes)
		if said := p.answer(t); said != `"ok"` {
			t.Errorf("extended %t: %q, stderr %q", extend, said, p.said(t))
		}
		if _, kills := p.end(t, false); kills != 0 {
			t.Errorf("extended %t: %d kills", extend, kills)
		}
		if err := back(); err != nil { // for a process that has ended
			t.Error(err)
		}
	}
}

// TestLimitsAreRequired: if a limit is missing or refused, no process is
// started.
func TestLimitsAreRequired(t *testing.T) {
	cfg := config(t)
	j := open(t, cfg)
	for _, bad := range []Limits{{}, {Memory: mib, MilliCPUs: 1000}, {Memory: 1 << 63, MilliCPUs: 1000, Threads: 10}, {Memory: 32 * mib, MilliCPUs: 1, Threads: 10}} {
		if p, err := j.Start(bad, os.Stdin, os.Stderr); err == nil {
			t.Errorf("limits %+v were accepted", bad)
			_ = p.Kill()
		}
	}
	if left := names(t, cfg.Folder); len(left) > 0 {
		t.Errorf("user ids %q are left", left)
	}
}

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// TestUIDs: living processes of several jails have different ids. Once all ids
// are in use, no further process is started.
func TestUIDs(t *testing.T) {
	cfg := config(t)
	cfg.UIDs = 4
	a, b := open(t, cfg), open(t, cfg)
	seen := map[int]bool{}
	var all []*inmate
	for _, j := range []*Jail{a, b, a, b} {
		p := start(t, j, roomy)
		if seen[p.Cell.UID()] {
			t.Errorf("user id %d is there twice", p.Cell.UID())
		}
		seen[p.Cell.UID()] = true
		all = append(all, p)
	}
	if p, err := a.Start(roomy, os.Stdin, os.Stderr); err == nil || !strings.Contains(err.Error(), "all 4 user ids") {
		t.Errorf("a fifth process with four ids: %v, %v", p, err)
	}
	freed := all[0].Cell.UID()
	all[0].end(t, true)
	p := start(t, b, roomy)
	if p.Cell.UID() != freed {
		t.Errorf("got user id %d, only %d was free", p.Cell.UID(), freed)
	}
	for _, i := range append(all[1:], p) {
		i.end(t, true)
	}
}

// TestSweep: another jail frees the cell of a process that ended without a
// parent, and keeps the cell of a living process.
func TestSweep(t *testing.T) {
	cfg := config(t)
	a, b := open(t, cfg), open(t, cfg)
	p, other := start(t, a, roomy), start(t, a, roomy)
	// As if their parent had died: only the processes themselves hold their
	// locks now.
	if err := errors.Join(p.Cell.Disown(), other.Cell.Disown()); err != nil {
		t.Fatal(err)
	}
	if err := b.Sweep(); err != nil {
		t.Fatal(err)
	}
	if left := names(t, cfg.Folder); len(left) != 2 {
		t.Fatalf("the living have %q", left)
	}
	found, err := b.Find(other.Pid)
	if err != nil || found.UID() != other.Cell.UID() {
		t.Fatalf("found %v, %v", found, err)
	}
	if _, limit, err := found.Memory(); err != nil || limit != roomy.Memory {
		t.Errorf("its limit is %d, %v", limit, err)
	}
	for _, i := range []*inmate{p, other} {
		if err := i.Kill(); err != nil {
			t.Fatal(err)
		}
		if _, err := i.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := found.Release(); err != nil {
		t.Error(err)
	}
	if left := names(t, cfg.Folder); len(left) != 1 {
		t.Errorf("after one was released there are %q", left)
	}
	if err := b.Sweep(); err != nil {
		t.Fatal(err)
	}
	if left := names(t, cfg.Folder); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// TestConcurrent starts and ends processes from many goroutines.
func TestConcurrent(t *testing.T) {
	cfg := config(t)
	j := open(t, cfg)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 4 {
				p := start(t, j, roomy)
				p.order(t, "threads", 0, 0)
				if said := p.answer(t); said != `"ok"` {
					t.Errorf("%q, stderr %q", said, p.said(t))
				}
				p.end(t, true)
			}
		})
	}
	all.Wait()
	if left := names(t, cfg.Folder); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// TestMachineIsUntouched: a jail does not change the process that owns it.
func TestMachineIsUntouched(t *testing.T) {
	look := func() string {
		t.Helper()
		var all []string
		for _, link := range []string{"ns/mnt", "ns/net", "ns/ipc", "ns/uts", "root", "cwd"} {
			target, err := os.Readlink("/proc/self/" + link)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, target)
		}
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(append(all, string(mounts)), "\n")
	}
	before := look()
	j := open(t, config(t))
	p := start(t, j, roomy)
	if during := look(); during != before {
		t.Errorf("before:\n%s\nduring:\n%s", before, during)
	}
	p.end(t, true)
}

// TestUnlimited: if limits cannot be set, no process is started unless
// AllowUnlimited is set.
func TestUnlimited(t *testing.T) {
	cfg := config(t)
	cfg.Cgroup = "no\nname" // the kernel refuses a line break
	if err := open(t, cfg).Check(); err == nil || !strings.Contains(err.Error(), "--allow-unlimited") {
		t.Errorf("limits that cannot be set: %v", err)
	}
	if _, err := open(t, cfg).Start(roomy, os.Stdin, os.Stderr); err == nil {
		t.Error("a process without limits was started")
	}
	cfg.AllowUnlimited = true
	p := start(t, open(t, cfg), roomy)
	if _, limit, err := p.Cell.Memory(); limit != 0 || err != nil {
		t.Errorf("limit %d, %v", limit, err)
	}
	p.order(t, "open", 0, 0)
	if status, _ := p.end(t, false); !status.Signaled() || status.Signal() != unix.SIGSYS || p.Cell.UID() == 0 {
		t.Errorf("user %d, ended with %#x", p.Cell.UID(), status)
	}
}

// TestRefusals: a jail whose walls cannot be built starts no process.
func TestRefusals(t *testing.T) {
	cfg := config(t)
	cfg.Program = filepath.Join(t.TempDir(), "none")
	if err := open(t, cfg).Check(); err == nil || !strings.Contains(err.Error(), "bind") {
		t.Errorf("a program that is not there: %v", err)
	}
	cfg = config(t)
	cfg.Program = filepath.Join(t.TempDir(), "private")
	if err := os.WriteFile(cfg.Program, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, cfg).Start(roomy, os.Stdin, os.Stderr); err == nil || !strings.Contains(err.Error(), "everybody must be allowed to read and execute "+cfg.Program) {
		t.Errorf("a program that only root may execute: %v", err)
	}
	if left := names(t, cfg.Folder); len(left) > 0 {
		t.Errorf("user ids %q are left", left)
	}
	cfg = config(t)
	cfg.Folder = filepath.Join(cfg.Program, "no-folder")
	if err := open(t, cfg).Check(); err == nil {
		t.Error("a folder that cannot be made was accepted")
	}
	for _, used := range []bool{false, true} {
		closed := New(config(t))
		if used {
			start(t, closed, roomy).end(t, true)
		}
		if err := closed.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := closed.Start(roomy, os.Stdin, os.Stderr); !errors.Is(err, errClosed) {
			t.Errorf("a closed jail, used before: %t, was asked to start something: %v", used, err)
		}
	}
}
