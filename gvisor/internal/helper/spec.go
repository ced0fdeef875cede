package helper

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"agentrun.dev/internal/engine/gvisorctl"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"
)

// newConfig is runsc's configuration: an empty network namespace of the host (the
// interface is described when the sandbox starts), no cgroups of its own (the engine
// has put this process into one), and no change of the host. Programs may have raw
// sockets, for ping, because all packets are checked outside of the sandbox.
func newConfig(c *gvisorctl.Create) (*config.Config, error) {
	flags := flag.NewFlagSet("runsc", flag.ContinueOnError)
	config.RegisterFlags(flags)
	if err := flags.Parse([]string{
		"--root=" + filepath.Join(c.RunDir, "state"), "--platform=" + c.Platform,
		"--network=none", "--net-raw", "--ignore-cgroups", "--host-settings=ignore",
		"--directfs=false", // no files of the host, which allows a narrower filter
	}); err != nil {
		return nil, fmt.Errorf("configure gVisor: %w", err)
	}
	conf, err := config.NewFromFlags(flags)
	if err != nil {
		return nil, fmt.Errorf("configure gVisor: %w", err)
	}
	return conf, nil
}

// allCapabilities are the capabilities of root inside the sandbox, whose kernel is
// gVisor's.
var allCapabilities = []string{
	"CAP_AUDIT_CONTROL", "CAP_AUDIT_READ", "CAP_AUDIT_WRITE", "CAP_BLOCK_SUSPEND", "CAP_CHOWN", "CAP_DAC_OVERRIDE",
	"CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_KILL", "CAP_LEASE",
	"CAP_LINUX_IMMUTABLE", "CAP_MAC_ADMIN", "CAP_MAC_OVERRIDE", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE",
	"CAP_NET_BROADCAST", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYSLOG",
	"CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_CHROOT", "CAP_SYS_MODULE", "CAP_SYS_NICE", "CAP_SYS_PACCT",
	"CAP_SYS_PTRACE", "CAP_SYS_RAWIO", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_WAKE_ALARM",
}

// newSpec describes the sandbox for runsc. A sandbox and its forks may differ in the
// host name and in the place of the root. The size of the disk is part of the
// checkpoint.
func newSpec(c *gvisorctl.Create, root string) *specs.Spec {
	caps := allCapabilities
	// A file system in memory may take as large a part of the memory as in a microVM.
	part := func(of uint64, options ...string) []string {
		return append(options, "size="+strconv.FormatUint(c.Memory/of, 10), "nosuid", "nodev")
	}
	return &specs.Spec{
		Version: "1.0.0", Hostname: c.Hostname,
		Root: &specs.Root{Path: filepath.Join(bundleDir(c), "root")},
		Process: &specs.Process{
			Args: agentArgs(c), Cwd: "/",
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Inheritable: caps, Permitted: caps},
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NOFILE", Soft: 65536, Hard: 1 << 20},
			},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=0755", "nosuid"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"gid=5", "mode=620", "ptmxmode=666"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: part(2, "mode=1777")},
			{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: part(5, "mode=0755")},
		},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
			{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
		}},
		Annotations: map[string]string{
			"dev.gvisor.spec.rootfs.source":  root,
			"dev.gvisor.spec.rootfs.type":    "erofs",
			"dev.gvisor.spec.rootfs.overlay": "memory",
			"dev.gvisor.spec.rootfs.options": "size=" + strconv.FormatUint(c.Disk, 10),
		},
	}
}

// agentArgs is the agent's command line.
func agentArgs(c *gvisorctl.Create) []string {
	args := []string{"init", "--enter-container"}
	for _, a := range c.DNS {
		args = append(args, "--dns="+a.StringExpanded())
	}
	return args
}

// shapePrefix begins the name of the bundle's folder. The name tells the sandbox's
// kernel how many processors and how much memory to show. runsc would take these from
// a cgroup that it has made, and the kernel may not read any file of ours.
const shapePrefix = "bundle@"

func bundleDir(c *gvisorctl.Create) string {
	return filepath.Join(c.RunDir, fmt.Sprintf("%s%d@%d", shapePrefix, c.VCPUs, c.Memory))
}

// writeBundle makes the folder that runsc starts from.
func writeBundle(c *gvisorctl.Create, spec *specs.Spec) (string, error) {
	bundle := bundleDir(c)
	b, err := json.Marshal(spec)
	if err == nil {
		err = os.MkdirAll(spec.Root.Path, 0o700)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(bundle, "config.json"), b, 0o600)
	}
	if err != nil {
		return "", fmt.Errorf("make the sandbox's bundle: %w", err)
	}
	return bundle, nil
}

// shapeOf finds the shape in the command line of a sandbox's kernel. Other command
// lines, such as those of a plain runsc, contain no shape.
func shapeOf(args []string) (cpus int, memory uint64, ok bool) {
	boot := slices.Index(args, "boot")
	if boot < 0 {
		return 0, 0, false
	}
	for _, a := range args[boot:] {
		if dir, found := strings.CutPrefix(a, "--bundle="); found {
			_, err := fmt.Sscanf(filepath.Base(dir), shapePrefix+"%d@%d", &cpus, &memory)
			return cpus, memory, err == nil
		}
	}
	return 0, 0, false
}

// IsOurs reports whether a command line belongs to the kernel of one of the helper's
// sandboxes, not to a plain runsc.
func IsOurs(args []string) bool {
	_, _, ok := shapeOf(args)
	return ok
}

// BootArgs adds the shape to the command line of the kernel of one of the helper's
// sandboxes. A complete command line stays as it is.
func BootArgs(args []string) []string {
	cpus, memory, ok := shapeOf(args)
	if !ok || slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--cpu-num") }) {
		return args
	}
	boot := slices.Index(args, "boot")
	out := slices.Clone(args[:boot+1])
	out = append(out, "--cpu-num="+strconv.Itoa(cpus), "--total-memory="+strconv.FormatUint(memory, 10))
	for i := boot + 1; i < len(args); i++ {
		if args[i] == "--total-memory" {
			i++ // skips its value, which is the host's memory
			continue
		}
		out = append(out, args[i])
	}
	return out
}
