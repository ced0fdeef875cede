package agent

import (
	"errors"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Folders in the initramfs where the parts of the root are put together. They cannot
// be reached from the new root.
const (
	buildDir = "/.agentrun"
	lowerDir = buildDir + "/lower"
	diskDir  = buildDir + "/disk"
	newRoot  = buildDir + "/root"
)

// System is a booted sandbox, with the data that its shutdown needs.
type System struct {
	Config BootConfig
	// upper is a descriptor of the filesystem under the overlay, which has no path
	// any more. It is -1 if no disk is under the overlay.
	upper int
}

// Boot turns the kernel's first process into a running system: it mounts the kernel's
// filesystems, builds the root that the command line asks for, moves into it and
// configures it. extra are keys of the command line that belong to the caller. An
// error names the failed step. There is no way back, so the caller should print the
// error on the console and power off. Minor failures are only logged.
//
// The Go runtime needs /dev/null, or open descriptors 0 to 2, before this function
// can run: the initramfs must hold /dev/console or /dev/null.
func Boot(log func(string), extra ...string) (*System, error) {
	if log == nil {
		log = func(string) {}
	}
	unix.Umask(0o022)
	for _, m := range earlyMounts {
		if err := m.mount(true); err != nil {
			return nil, err
		}
	}
	line, err := readFile("/proc/cmdline", maxCmdline)
	if err != nil {
		return nil, failed("read", "/proc/cmdline", err)
	}
	if slices.Contains(strings.Fields(string(line)), "norandmaps") {
		if err := randomizeOthers(); err != nil {
			return nil, err
		}
	}
	cfg, err := ParseCmdline(strings.TrimSuffix(string(line), "\n"), extra...)
	if err != nil {
		return nil, err
	}
	return boot(cfg, log)
}

// randomizeOthers makes the kernel randomise the memory layout of every program that
// starts from now on. The command line has turned randomisation off for the first
// program, the agent itself. The agent's heap is Go's, and all forks share its
// addresses anyway. Where stack and mappings are close together they share page
// tables, of which a fork owns the ones that it uses.
func randomizeOthers() error {
	const path = "/proc/sys/kernel/randomize_va_space"
	fd, err := open(unix.AT_FDCWD, path, unix.O_WRONLY, 0)
	if err != nil {
		return failed("open", path, err)
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte("2\n"))
	return failed("write", path, err)
}

// boot continues once the command line is known.
func boot(cfg BootConfig, log func(string)) (*System, error) {
	m := &System{Config: cfg, upper: -1}
	if cfg.Root != "" {
		if err := m.buildRoot(); err != nil {
			return nil, err
		}
		if err := switchRoot(cfg.Overlay != OverlayNone, log); err != nil {
			return nil, err
		}
	}
	writable := cfg.Root == "" || cfg.Overlay != OverlayNone
	for _, mnt := range lateMounts {
		if err := mnt.mount(writable); err != nil {
			if mnt.optional {
				log(err.Error())
				continue
			}
			return nil, err
		}
	}
	if !canWrite("/tmp") {
		if err := tmpMount.mount(writable); err != nil {
			log(err.Error())
		}
	}
	if err := configure(&cfg, log); err != nil {
		return nil, err
	}
	return m, nil
}

// mountPoint is one filesystem to mount.
type mountPoint struct {
	device, dir, fstype string
	flags               uintptr
	options             string
	optional            bool // the sandbox works without the mount
}

const nosuid = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// earlyMounts are needed to find and mount the root; they move into it.
var earlyMounts = []mountPoint{
	{device: "proc", dir: "/proc", fstype: "proc", flags: nosuid},
	{device: "sysfs", dir: "/sys", fstype: "sysfs", flags: nosuid},
	{device: "devtmpfs", dir: "/dev", fstype: "devtmpfs", flags: unix.MS_NOSUID, options: "mode=0755"},
}

// lateMounts are made in the final root.
var lateMounts = []mountPoint{
	{device: "devpts", dir: "/dev/pts", fstype: "devpts", flags: unix.MS_NOSUID | unix.MS_NOEXEC, options: "gid=5,mode=620,ptmxmode=666"},
	{device: "shm", dir: "/dev/shm", fstype: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, options: "mode=1777"},
	{device: "run", dir: "/run", fstype: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, options: "mode=0755,size=20%"},
	{device: "cgroup2", dir: "/sys/fs/cgroup", fstype: "cgroup2", flags: nosuid, optional: true},
}

// tmpMount is only mounted if /tmp is not writable.
var tmpMount = mountPoint{device: "tmp", dir: "/tmp", fstype: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, options: "mode=1777,size=50%"}

// mount mounts the filesystem, and makes the folder if mayMake allows it. Filesystems
// that the kernel (devtmpfs) or the maker of the initramfs has mounted there already
// are left alone.
func (m *mountPoint) mount(mayMake bool) error {
	if err := folder(m.dir, mayMake); err != nil {
		return err
	}
	if root, err := isMountRoot(unix.AT_FDCWD, m.dir); err == nil && root {
		return nil
	}
	if err := unix.Mount(m.device, m.dir, m.fstype, m.flags, m.options); err != nil {
		return m.failed(err)
	}
	return nil
}

func (m *mountPoint) failed(err error) error {
	thing := m.device + " on " + m.dir + " (" + m.fstype
	if m.options != "" {
		thing += ", " + m.options
	}
	if err == syscall.ENODEV {
		return fail(ErrUnsupported, "mount", thing+")", "the kernel does not know this filesystem")
	}
	return failed("mount", thing+")", err)
}

// folder makes sure that a mount point exists.
func folder(dir string, mayMake bool) error {
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	switch {
	case err == nil && fileType(st.Mode) == TypeDirectory:
		return nil
	case err == nil:
		return fail(ErrNotDirectory, "mount on", dir, "")
	case !mayMake:
		return fail(ErrNotFound, "mount on", dir, "the read-only root has no such folder: add it to the image, or boot with agentrun.overlay=tmpfs")
	}
	return failed("make folder", dir, mkdirAll(dir, 0o755))
}

// buildRoot mounts the root device at newRoot, under an overlay if the command line
// asks for one.
func (m *System) buildRoot() error {
	cfg := &m.Config
	for _, dir := range []string{lowerDir, diskDir, newRoot} {
		if err := mkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	lower := mountPoint{device: cfg.Root, dir: lowerDir, fstype: cfg.RootFSType, flags: unix.MS_RDONLY, options: cfg.RootFlags}
	if cfg.Overlay == OverlayNone {
		lower.dir = newRoot
	}
	if err := lower.mount(true); err != nil {
		return err
	}
	if cfg.Overlay == OverlayNone {
		return nil
	}
	disk := mountPoint{device: "overlay-upper", dir: diskDir, fstype: "tmpfs", flags: unix.MS_NOATIME, options: "mode=0755,size=50%"}
	if cfg.Overlay != OverlayTmpfs {
		// Freed blocks are given back to the host. Inode tables that are still zero
		// need not be zeroed again.
		disk.device, disk.fstype, disk.options = cfg.Overlay, "ext4", "discard,noinit_itable"
	}
	if err := disk.mount(true); err != nil {
		return err
	}
	for _, dir := range []string{diskDir + "/upper", diskDir + "/work"} {
		if err := mkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if cfg.Overlay != OverlayTmpfs {
		var err error
		if m.upper, err = open(unix.AT_FDCWD, diskDir, unix.O_RDONLY|unix.O_DIRECTORY, 0); err != nil {
			return failed("open", diskDir, err)
		}
	}
	overlay := mountPoint{device: "overlay", dir: newRoot, fstype: "overlay",
		options: "lowerdir=" + lowerDir + ",upperdir=" + diskDir + "/upper,workdir=" + diskDir + "/work"}
	return overlay.mount(true)
}

// switchRoot makes newRoot the root, as switch_root(8): an initramfs cannot be
// pivoted away from, so the new root is moved over it.
func switchRoot(mayMake bool, log func(string)) error {
	old, err := open(unix.AT_FDCWD, "/", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return failed("open", "/", err)
	}
	defer unix.Close(old)
	for _, m := range earlyMounts {
		to := newRoot + m.dir
		if err := folder(to, mayMake); err != nil {
			return rename404(err, m.dir)
		}
		if err := unix.Mount(m.dir, to, "", unix.MS_MOVE, ""); err != nil {
			return failed("move mount", m.dir+" to "+to, err)
		}
	}
	if err := unix.Chdir(newRoot); err != nil {
		return failed("enter", newRoot, err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return failed("move mount", newRoot+" to /", err)
	}
	if err := unix.Chroot("."); err != nil {
		return failed("change root to", newRoot, err)
	}
	if err := unix.Chdir("/"); err != nil {
		return failed("enter", "/", err)
	}
	if err := freeInitramfs(old); err != nil {
		log(err.Error())
	}
	return nil
}

// rename404 replaces the path in an error by the folder as the image's author knows
// it.
func rename404(err error, dir string) error {
	var e *Error
	if errors.As(err, &e) {
		e.Thing = dir
	}
	return err
}

// freeInitramfs removes the content of the initramfs open at fd, which is memory. It
// keeps the running program, which the mapping would hold anyway and which must stay
// executable as /proc/self/exe, and all mounts. It does nothing unless fd really is a
// filesystem in memory.
func freeInitramfs(fd int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return failed("look at", "the initramfs", err)
	}
	if fs.Type != unix.RAMFS_MAGIC && fs.Type != unix.TMPFS_MAGIC {
		return nil
	}
	var self unix.Stat_t
	if err := unix.Stat("/proc/self/exe", &self); err != nil {
		return failed("look at", "/proc/self/exe", err)
	}
	return failed("free", "the initramfs", freeFolder(fd, &self, 0))
}

// freeFolder is not removeTree, which stops at the first mount: here the lower
// and upper filesystems of the overlay are in the tree and must stay.
func freeFolder(fd int, keep *unix.Stat_t, depth int) error {
	if depth == maxCopyDepth {
		return syscall.ELOOP
	}
	if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
		return err
	}
	var names []string // an initramfs is small, and removing while reading could skip entries
	if err := eachName(fd, func(name []byte) bool { names = append(names, string(name)); return true }); err != nil {
		return err
	}
	for _, name := range names {
		var st unix.Stat_t
		if unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || (st.Dev == keep.Dev && st.Ino == keep.Ino) {
			continue
		}
		if fileType(st.Mode) != TypeDirectory {
			if err := unix.Unlinkat(fd, name, 0); err != nil && err != syscall.EBUSY {
				return err
			}
			continue
		}
		if root, err := isMountRoot(fd, name); err != nil || root {
			continue
		}
		sub, err := open(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		err = freeFolder(sub, keep, depth+1)
		unix.Close(sub)
		if err != nil {
			return err
		}
		if err := unix.Unlinkat(fd, name, unix.AT_REMOVEDIR); err != nil && err != syscall.ENOTEMPTY && err != syscall.EBUSY {
			return err
		}
	}
	return nil
}

// canWrite reports whether files can be made in dir.
func canWrite(dir string) bool { return access(dir, unix.W_OK) == nil }
