package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"agentrun.dev/internal/host/assets"
)

// loadHost reads a fixture: files of a host behind "-- path --" lines.
func loadHost(t *testing.T, name string) fs.FS {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	files := fstest.MapFS{}
	var current *fstest.MapFile
	for line := range strings.Lines(string(data)) {
		if path, ok := strings.CutPrefix(line, "-- "); ok {
			current = &fstest.MapFile{}
			files[strings.TrimSuffix(strings.TrimSpace(path), " --")] = current
		} else if current != nil {
			current.Data = append(current.Data, line...)
		}
	}
	return files
}

// wellProbes answers like a host without problems.
func wellProbes() Probes {
	return Probes{
		KVM:         func() ([]string, error) { return nil, nil },
		Jail:        func() error { return nil },
		DiskLimits:  func(string) (string, error) { return "8:0", nil },
		Userfaultfd: func() (uint64, error) { return uffdPagefaultWP | uffdShmemWP, nil },
		Memfd:       func() error { return nil },
		Disk:        func(string) (uint64, error) { return 50 * gib, nil },
		Writable:    func(string) bool { return true },
		Root:        func() bool { return true },
		Asset:       func(a assets.Asset) (string, error) { return "/opt/agentrun/" + string(a), nil },
		LookPath:    func(name string) (string, error) { return "/usr/bin/" + name, nil },
	}
}

func run(t *testing.T, fixture string, change func(*Probes)) Report {
	t.Helper()
	p := wellProbes()
	if change != nil {
		change(&p)
	}
	return Run(t.Context(), Config{Files: loadHost(t, fixture), CacheFolder: "/var/cache/agentrun", StateFolder: "/var/lib/agentrun", Probes: p})
}

func find(t *testing.T, r Report, name string) Check {
	t.Helper()
	for _, c := range r.Checks {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no check %q in %+v", name, r.Checks)
	return Check{}
}

// pathError is the error of opening /dev/kvm.
func pathError(err error) error { return &fs.PathError{Op: "open", Path: "/dev/kvm", Err: err} }

// TestSlowVMs: if KVM moves threads between cgroups, the hierarchy should be
// mounted with favordynmods.
func TestSlowVMs(t *testing.T) {
	const mountinfo, osrelease = "proc/self/mountinfo", "proc/sys/kernel/osrelease"
	for _, tt := range []struct {
		release, options string
		fix              string // empty: no problem
	}{
		{"6.1.0-18-amd64", "rw,nsdelegate,favordynmods", ""},
		{"6.1.0-18-amd64", "rw,nsdelegate,memory_recursiveprot", "mount -o remount,nsdelegate,memory_recursiveprot,favordynmods /sys/fs/cgroup"},
		{"6.12.1", "rw", "mount -o remount,favordynmods /sys/fs/cgroup"},
		{"6.13.0", "rw", ""},
		{"5.15.0", "rw", ""}, // it does not have this option
	} {
		files := loadHost(t, "amd-debian12").(fstest.MapFS)
		files[osrelease] = &fstest.MapFile{Data: []byte(tt.release)}
		files[mountinfo] = &fstest.MapFile{Data: []byte("28 23 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 " + tt.options + "\n")}
		c := find(t, Run(t.Context(), Config{Files: files, CacheFolder: "/c", StateFolder: "/s", Probes: wellProbes()}), CheckCgroups)
		if (c.Status == OK) != (tt.fix == "") || !strings.HasSuffix(c.Fix, tt.fix) {
			t.Errorf("%s with %s: %+v", tt.release, tt.options, c)
		}
	}
}

// TestHosts simulates whole hosts and checks the check in which each is
// special.
func TestHosts(t *testing.T) {
	noKVM := func(p *Probes) { p.KVM = func() ([]string, error) { return nil, pathError(fs.ErrNotExist) } }
	for _, test := range []struct {
		name, fixture string
		change        func(*Probes)
		check         string
		status        Status
		detail, fix   string // substrings
		engine        Engine
	}{
		{"bare metal", "amd-debian12", nil, CheckKVM, OK, "hardware virtualization (SVM)", "", EngineMicroVM},
		{"bare metal, cgroup v2", "amd-debian12", nil, CheckCgroups, OK, "v2; usable: memory, cpu, pids, io", "", EngineMicroVM},
		{"nested", "intel-nested", nil, CheckKVM, Warn, "(VMX), nested", "slower", EngineMicroVM},
		{"kernel without mapping ahead", "amd-debian12", nil, CheckKernel, OK, "faster from 6.11 on", "", EngineMicroVM},
		{"old kernel", "intel-nested", nil, CheckKernel, Warn, "Linux 5.4.0-150-generic is older than 5.10", "newer", EngineMicroVM},
		{"cgroup v1", "intel-nested", nil, CheckCgroups, OK, "v1; usable: memory, cpu, pids, io (v1 does not", "", EngineMicroVM},
		{"kvm-pvm", "kvm-pvm", nil, CheckKVM, Fail, "supervisor is emulated", "build/testbed shell", EngineGVisor},
		{"hybrid cgroups", "kvm-pvm", nil, CheckCgroups, OK, "hybrid", "", EngineGVisor},
		{"kvm-pvm's capabilities", "kvm-pvm", nil, CheckCapabilities, OK, "all", "", EngineGVisor},
		{"module not loaded, AMD", "amd-debian12", noKVM, CheckKVM, Fail, "has SVM", "modprobe kvm_amd", EngineGVisor},
		{"module not loaded, Intel", "intel-nested", noKVM, CheckKVM, Fail, "has VMX", "modprobe kvm_intel", EngineGVisor},
		{"VM without nesting", "cloud-vm", noKVM, CheckKVM, Fail, "without nested virtualization", "testbed", EngineNone},
		{"no controllers", "cloud-vm", noKVM, CheckCgroups, Warn, "absent: memory, cpu, pids, io", "cgroup2", EngineNone},
		{"little memory", "cloud-vm", noKVM, CheckMemory, Fail, "90 MiB of 512 MiB available", "128 MiB", EngineNone},
		{"KVM without extension", "cloud-vm", nil, CheckKVM, Fail, "not hardware virtualization", "testbed", EngineNone},
		{"no permission", "amd-debian12", func(p *Probes) {
			p.KVM = func() ([]string, error) { return nil, pathError(fs.ErrPermission) }
		}, CheckKVM, Fail, "may not be opened", "usermod -aG kvm", EngineGVisor},
		{"KVM broken", "amd-debian12", func(p *Probes) {
			p.KVM = func() ([]string, error) { return nil, errors.New("API version 11") }
		}, CheckKVM, Fail, "API version 11", "dmesg", EngineGVisor},
		{"capability missing", "amd-debian12", func(p *Probes) {
			p.KVM = func() ([]string, error) { return []string{"split irqchip", "MP state"}, nil }
		}, CheckCapabilities, Fail, "missing: split irqchip, MP state", "4.19", EngineNone},
		{"cgroups not delegated", "amd-debian12", func(p *Probes) {
			p.Writable = func(string) bool { return false }
		}, CheckCgroups, Warn, "not writable by this user: memory, cpu, pids, io", "Delegate=yes", EngineMicroVM},
		{"no jail", "amd-debian12", func(p *Probes) {
			p.Jail = func() error { return errors.New("make namespaces: operation not permitted") }
		}, CheckJail, Fail, "operation not permitted", "--allow-unjailed", EngineNone},
		{"disks limited twice", "amd-debian12", nil, CheckDiskLimits, OK, "token buckets in virtio-blk, and cgroup io for device 8:0", "", EngineMicroVM},
		{"disks limited once", "amd-debian12", func(p *Probes) {
			p.DiskLimits = func(string) (string, error) { return "", errors.New("these are cgroups v1") }
		}, CheckDiskLimits, OK, "token buckets in virtio-blk alone; cgroup io adds nothing in /var/lib/agentrun: these are cgroups v1", "", EngineMicroVM},
		{"no userfaultfd", "amd-debian12", func(p *Probes) {
			p.Userfaultfd = func() (uint64, error) { return 0, errors.New("operation not permitted") }
		}, CheckUserfaultfd, Warn, "operation not permitted", "/dev/userfaultfd", EngineMicroVM},
		{"userfaultfd without WP", "amd-debian12", func(p *Probes) {
			p.Userfaultfd = func() (uint64, error) { return uffdPagefaultWP, nil }
		}, CheckUserfaultfd, Warn, "features 0x1", "6.1", EngineMicroVM},
		{"no device for userfaultfd", "intel-nested", nil, CheckUserfaultfd, Warn, "no /dev/userfaultfd", "stands still", EngineMicroVM},
		{"no memfd", "amd-debian12", func(p *Probes) {
			p.Memfd = func() error { return errors.New("function not implemented") }
		}, CheckMemfd, Fail, "not implemented", "seccomp", EngineNone},
		{"disk full", "amd-debian12", func(p *Probes) {
			p.Disk = func(string) (uint64, error) { return 10 * mib, nil }
		}, CheckDisk, Fail, "10 MiB free in /var/cache/agentrun", "AGENTRUN_CACHE", EngineNone},
		{"disk nearly full", "amd-debian12", func(p *Probes) {
			p.Disk = func(string) (uint64, error) { return 2 * gib, nil }
		}, CheckDisk, Warn, "2.0 GiB free", "4.0 GiB", EngineMicroVM},
		{"disk unreadable", "amd-debian12", func(p *Probes) {
			p.Disk = func(string) (uint64, error) { return 0, errors.New("stale handle") }
		}, CheckDisk, Warn, "stale handle", "AGENTRUN_CACHE", EngineMicroVM},
		{"not built", "amd-debian12", func(p *Probes) {
			p.Asset = func(a assets.Asset) (string, error) {
				if a == assets.VMM {
					return "/opt/agentrun/vmm", nil
				}
				return "", fs.ErrNotExist
			}
		}, CheckAssets, Fail, "missing: vmlinux, guest-agent", "make build", EngineNone},
		{"gVisor can be used", "kvm-pvm", nil, CheckGVisor, OK, "no extended attributes", "", EngineGVisor},
		{"gVisor without its helper", "kvm-pvm", func(p *Probes) {
			p.Asset = func(a assets.Asset) (string, error) {
				if a == assets.GVisorHelper {
					return "", fs.ErrNotExist
				}
				return "/opt/agentrun/" + string(a), nil
			}
		}, CheckGVisor, Warn, "missing: gvisor-helper", "make build", EngineNone},
		{"gVisor without root", "kvm-pvm", func(p *Probes) {
			p.Root = func() bool { return false }
		}, CheckGVisor, Warn, "only root", "run as root", EngineNone},
		{"KVM without gVisor", "amd-debian12", func(p *Probes) {
			p.Root = func() bool { return false }
		}, CheckGVisor, Warn, "only root", "run as root", EngineMicroVM},
		{"gVisor without a kernel for microVMs", "kvm-pvm", func(p *Probes) {
			p.Asset = func(a assets.Asset) (string, error) {
				if a == assets.Kernel {
					return "", fs.ErrNotExist
				}
				return "/opt/agentrun/" + string(a), nil
			}
		}, CheckAssets, Fail, "missing: vmlinux", "make build", EngineGVisor},
		{"no mke2fs", "amd-debian12", func(p *Probes) {
			p.LookPath = func(name string) (string, error) {
				if strings.HasSuffix(name, "mke2fs") {
					return "", fs.ErrNotExist
				}
				return "/usr/bin/" + name, nil
			}
		}, CheckTools, Warn, "mke2fs", "e2fsprogs", EngineMicroVM},
		{"no mkfs.erofs", "amd-debian12", func(p *Probes) {
			p.LookPath = func(string) (string, error) { return "", fs.ErrNotExist }
		}, CheckTools, Fail, "mkfs.erofs", "erofs-utils", EngineNone},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := run(t, test.fixture, test.change)
			c := find(t, r, test.check)
			if c.Status != test.status || !strings.Contains(c.Detail, test.detail) || !strings.Contains(c.Fix, test.fix) {
				t.Errorf("%s: got %s %q fix %q; want %s …%s… fix …%s…", test.check, c.Status, c.Detail, c.Fix, test.status, test.detail, test.fix)
			}
			if r.Engine != test.engine || r.Usable() != (test.engine != EngineNone) {
				t.Errorf("engine %q, usable %t; want %q", r.Engine, r.Usable(), test.engine)
			}
			checkShape(t, r)
		})
	}
}

// checkShape checks properties of every report: the order of names, and a fix
// for each problem.
func checkShape(t *testing.T, r Report) {
	t.Helper()
	want := []string{
		CheckKVM, CheckCapabilities, CheckCPU, CheckKernel, CheckCgroups, CheckJail, CheckDiskLimits,
		CheckUserfaultfd, CheckMemfd, CheckMemory, CheckDisk, CheckAssets, CheckTools, CheckGVisor,
	}
	var got []string
	for _, c := range r.Checks {
		got = append(got, c.Name)
		if (c.Fix == "") != (c.Status == OK) {
			t.Errorf("%s is %s with fix %q", c.Name, c.Status, c.Fix)
		}
		if c.Detail == "" {
			t.Errorf("%s has no detail", c.Name)
		}
	}
	if !slices.Contains(got, CheckCapabilities) {
		want = slices.DeleteFunc(want, func(n string) bool { return n == CheckCapabilities })
	}
	if !slices.Equal(got, want) {
		t.Errorf("checks %v, want %v", got, want)
	}
}

// TestEmptyRoot: in a container without /proc no check panics, and all checks
// report.
func TestEmptyRoot(t *testing.T) {
	r := Run(t.Context(), Config{Files: fstest.MapFS{}, Probes: wellProbes()})
	checkShape(t, r)
	if c := find(t, r, CheckCPU); c.Status != Fail {
		t.Errorf("CPU check without /proc/cpuinfo is %s", c.Status)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r := Run(ctx, Config{Probes: wellProbes()}); r.Usable() || len(r.Checks) != 0 {
		t.Errorf("an interrupted examination says %+v", r)
	}
}

func TestParseVersion(t *testing.T) {
	for release, want := range map[string][2]int{
		"6.1.0-18-amd64": {6, 1}, "5.10": {5, 10}, "6.18-rc1": {6, 18}, "4.19.0+": {4, 19},
	} {
		if v, ok := parseVersion(release); !ok || v != want {
			t.Errorf("%s parses as %v, %t", release, v, ok)
		}
	}
	for _, release := range []string{"", "linux", "6", ".1", "6."} {
		if v, ok := parseVersion(release); ok {
			t.Errorf("%q parses as %v", release, v)
		}
	}
}

func TestPrint(t *testing.T) {
	r := Report{Engine: EngineNone, Advice: "Do something.", Checks: []Check{
		{Name: "a", Status: OK, Detail: "2 × fine"},
		{Name: "long-name", Status: Warn, Detail: "hm", Fix: "look"},
		{Name: "b", Status: Fail, Detail: "broken", Fix: "mend it"},
	}}
	for name, test := range map[string]struct {
		style Style
		want  string
	}{
		"unicode": {Style{}, `✓ a          2 × fine
! long-name  hm
             fix: look
✗ b          broken
             fix: mend it

engine: none. Do something.
`},
		"plain": {Style{Plain: true}, `ok   a          2 x fine
warn long-name  hm
                fix: look
FAIL b          broken
                fix: mend it

engine: none. Do something.
`},
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			if err := r.Print(&b, test.style); err != nil {
				t.Fatal(err)
			}
			if b.String() != test.want {
				t.Errorf("got\n%swant\n%s", b.String(), test.want)
			}
		})
	}
	var b strings.Builder
	if err := r.Print(&b, Style{Color: true}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "\x1b[31m✗\x1b[0m b") {
		t.Errorf("no red cross in %q", b.String())
	}
}

// TestJSON fixes the schema, because programs read it.
func TestJSON(t *testing.T) {
	got, err := json.Marshal(Report{Schema: Schema, Engine: EngineMicroVM, Advice: "Go.", Checks: []Check{
		{Name: CheckKVM, Status: Warn, Detail: "d", Fix: "f"}, {Name: CheckCPU, Status: OK, Detail: "d"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"schema":1,"engine":"microvm","advice":"Go.","checks":[` +
		`{"name":"kvm","status":"warn","detail":"d","fix":"f"},{"name":"cpu","status":"ok","detail":"d"}]}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestThisHost runs the real probes. Their results differ between hosts, but
// each returns a result that agrees with the files.
func TestThisHost(t *testing.T) {
	r := Run(t.Context(), Config{CacheFolder: filepath.Join(t.TempDir(), "not", "made", "yet")})
	checkShape(t, r)
	for _, c := range r.Checks {
		t.Logf("%-4s %-16s %s", c.Status, c.Name, c.Detail)
	}
	if _, err := os.Stat("/sys/module/kvm_pvm"); err == nil {
		if c := find(t, r, CheckKVM); c.Status != Fail || !strings.Contains(c.Detail, "kvm-pvm") {
			t.Errorf("kvm_pvm is loaded, but the check says %+v", c)
		}
	}
	for _, name := range []string{CheckCPU, CheckMemfd, CheckDisk} {
		if c := find(t, r, name); c.Status == Fail {
			t.Errorf("%s fails on a machine that runs tests: %s", name, c.Detail)
		}
	}
}
