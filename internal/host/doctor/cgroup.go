package doctor

import (
	"bufio"
	"path"
	"slices"
	"strings"
)

// wantedControllers limit a sandbox's use of its host.
var wantedControllers = []string{"memory", "cpu", "pids", "io"}

// cgroupLayout describes how the control groups of a host are mounted.
type cgroupLayout struct {
	v2 bool
	v1 bool
	// folders maps a controller, by its v2 name, to its hierarchy's folder.
	folders map[string]string
	// v2Folder is the mount point of v2, v2Options its mount options.
	v2Folder  string
	v2Options []string
}

// name is the name that administrators use for the layout.
func (l cgroupLayout) name() string {
	switch {
	case l.v1 && l.v2:
		return "hybrid (v1 controllers beside v2)"
	case l.v2:
		return "v2"
	case l.v1:
		return "v1"
	}
	return "none"
}

// readCgroups finds the hierarchies in the mount table (proc(5): the fields
// after the lone hyphen are type, source and super options).
func (h *host) readCgroups() (cgroupLayout, error) {
	l := cgroupLayout{folders: map[string]string{}}
	table, err := h.read("proc/self/mountinfo")
	if err != nil {
		return l, err
	}
	lines := bufio.NewScanner(strings.NewReader(table))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		before, after, ok := strings.Cut(lines.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		folder := left[4]
		switch right[0] {
		case "cgroup2":
			l.v2, l.v2Folder, l.v2Options = true, folder, strings.Split(right[2], ",")
			have, err := h.read(path.Join(strings.TrimPrefix(folder, "/"), "cgroup.controllers"))
			if err != nil {
				continue
			}
			for c := range strings.FieldsSeq(have) {
				l.folders[c] = folder
			}
		case "cgroup":
			l.v1 = true
			for c := range strings.SplitSeq(right[2], ",") {
				if c == "blkio" {
					c = "io"
				}
				if _, taken := l.folders[c]; !taken {
					l.folders[c] = folder
				}
			}
		}
	}
	return l, nil
}

func checkCgroups(h *host) []Check {
	c := Check{Name: CheckCgroups, Status: OK}
	l, err := h.readCgroups()
	if err != nil {
		c.Status, c.Detail, c.Fix = Warn, "the mount table cannot be read", "mount /proc"
		return one(c)
	}
	var usable, absent, locked []string
	for _, name := range wantedControllers {
		switch folder, ok := l.folders[name]; {
		case !ok:
			absent = append(absent, name)
		case !h.Probes.Writable(folder):
			locked = append(locked, name)
		default:
			usable = append(usable, name)
		}
	}
	c.Detail = l.name()
	if len(usable) > 0 {
		c.Detail += "; usable: " + strings.Join(usable, ", ")
	}
	if len(absent) > 0 {
		c.Status = Warn
		c.Detail += "; absent: " + strings.Join(absent, ", ")
		c.Fix = "mount a cgroup2 file system that offers them"
	}
	if len(locked) > 0 {
		c.Status = Warn
		c.Detail += "; not writable by this user: " + strings.Join(locked, ", ")
		c.Fix = "run as root, or have a cgroup delegated to this user (systemd: Delegate=yes)"
	}
	if c.Status == Warn {
		c.Fix += "; without limits sandboxes start only with --allow-unlimited"
		return one(c)
	}
	if l.v1 && slices.Contains(usable, "io") {
		c.Detail += " (v1 does not slow buffered writes down)"
	}
	if h.slowVMs(l) {
		options := slices.DeleteFunc(l.v2Options, func(o string) bool { return o == "rw" || o == "ro" })
		c.Status = Warn
		c.Detail += "; without favordynmods every new VM waits for all processors of the host"
		c.Fix = "for faster forks: mount -o remount," + strings.Join(append(options, favorsModifications), ",") + " " + l.v2Folder
	}
	return one(c)
}

// favorsModifications is the mount option with which moving a process to another
// cgroup does not wait for an RCU grace period (admin-guide/cgroup-v2.rst).
const favorsModifications = "favordynmods"

// KVM moved a kernel thread of each new VM into its process's cgroup until Linux
// 6.13, which gave the process a thread of its own for that. The option exists
// since 6.0.
var (
	firstFavoring = [2]int{6, 0}
	firstFast     = [2]int{6, 13}
)

// slowVMs reports whether making a VM takes longer on this host than necessary.
func (h *host) slowVMs(l cgroupLayout) bool {
	release, err := h.read("proc/sys/kernel/osrelease")
	v, ok := parseVersion(release)
	return err == nil && ok && l.v2 && !slices.Contains(l.v2Options, favorsModifications) &&
		slices.Compare(v[:], firstFavoring[:]) >= 0 && slices.Compare(v[:], firstFast[:]) < 0
}
