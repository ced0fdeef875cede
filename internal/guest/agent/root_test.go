package agent

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// onOwnThread runs fn on an OS thread with its own mount, host name and network
// namespaces, root folder and umask. The thread ends with it.
func onOwnThread(t *testing.T, fn func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// fakeInitramfs mounts a tmpfs with some content and makes it the root.
func fakeInitramfs(dir string) (rootfs int, err error) {
	if err := unix.Mount("rootfs", dir, "tmpfs", 0, ""); err != nil {
		return -1, err
	}
	for _, d := range []string{"/dev", "/bin/deep/er"} {
		if err := os.MkdirAll(dir+d, 0o755); err != nil {
			return -1, err
		}
	}
	if err := errors.Join(
		os.WriteFile(dir+"/init", []byte("init"), 0o755),
		os.WriteFile(dir+"/bin/deep/er/file", make([]byte, 1<<16), 0o644),
		os.Symlink("/bin", dir+"/link"),
	); err != nil {
		return -1, err
	}
	rootfs, err = unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Chroot(dir); err != nil {
		return -1, err
	}
	if err := unix.Chdir("/"); err != nil {
		return -1, err
	}
	for _, m := range earlyMounts {
		if err := m.mount(true); err != nil {
			return -1, err
		}
	}
	return rootfs, nil
}

// newRootImage packs a folder into a read-only image behind a loop device.
func newRootImage(t *testing.T, content map[string]string) string {
	t.Helper()
	dir, img := t.TempDir(), filepath.Join(t.TempDir(), "root.erofs")
	os.Chmod(dir, 0o755)
	for name, data := range content {
		if data == "/" {
			os.MkdirAll(dir+name, 0o755)
			continue
		}
		os.MkdirAll(filepath.Dir(dir+name), 0o755)
		writeTestFile(t, dir+name, data, 0o644)
	}
	if out, err := exec.Command("mkfs.erofs", "-Enosbcrc", img, dir).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs (install erofs-utils): %v: %s", err, out)
	}
	return attachLoop(t, img)
}

func expectFile(path, want string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if string(b) != want {
		return errors.New(path + " holds " + string(b) + ", want " + want)
	}
	return nil
}

func expectMounted(dirs ...string) error {
	for _, d := range dirs {
		if root, err := isMountRoot(unix.AT_FDCWD, d); err != nil || !root {
			return errors.Join(errors.New("nothing is mounted at "+d), err)
		}
	}
	return nil
}

func TestBootWithTmpfsOverlay(t *testing.T) {
	dev := newRootImage(t, map[string]string{"/etc/os-release": "test\n", "/etc/hosts": "127.0.0.1 localhost", "/tmp": "/"})
	dir := t.TempDir()
	onOwnThread(t, func() error {
		rootfs, err := fakeInitramfs(dir)
		if err != nil {
			return err
		}
		defer unix.Close(rootfs)
		tap, err := newTap("eth0")
		if err != nil {
			return err
		}
		defer unix.Close(tap)
		cfg, err := ParseCmdline("console=ttyS0 agentrun.root=" + dev + " agentrun.hostname=box-1 agentrun.ip=10.0.2.15/24,gw=10.0.2.2,dns=10.0.2.3,dns=1.1.1.1")
		if err != nil {
			return err
		}
		var logged []string
		m, err := boot(cfg, func(s string) { logged = append(logged, s) })
		if err != nil {
			return err
		}
		if m.upper != -1 || len(logged) > 0 {
			return errors.New("logged: " + strings.Join(logged, "; "))
		}
		host, _ := os.Hostname()
		if host != "box-1" {
			return errors.New("host name " + host)
		}
		if err := errors.Join(
			expectFile("/etc/os-release", "test\n"),
			expectFile("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1\tbox-1\n"),
			expectFile("/etc/hostname", "box-1\n"),
			expectFile("/etc/resolv.conf", "nameserver 10.0.2.3\nnameserver 1.1.1.1\n"),
			expectFile("/run/agentrun/generation", "0\n"),
			expectMounted("/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/run", "/sys/fs/cgroup"),
			os.WriteFile("/tmp/new", nil, 0o600),
			os.Remove("/etc/os-release"),
			expectNetwork(),
		); err != nil {
			return err
		}
		if _, err := os.Stat(buildDir); err == nil {
			return errors.New("the parts of the root can be seen in it")
		}
		if _, err := os.Stat("/init"); err == nil {
			return errors.New("still in the initramfs")
		}
		return expectFreed(rootfs)
	})
}

// expectFreed checks that only the folders that contain mounts are left.
func expectFreed(rootfs int) error {
	var left []string
	unix.Seek(rootfs, 0, 0)
	eachName(rootfs, func(n []byte) bool { left = append(left, string(n)); return true })
	slices.Sort(left)
	for _, name := range left {
		if name != ".agentrun" && name != "dev" && name != "proc" && name != "sys" {
			return errors.New("not freed: " + strings.Join(left, " "))
		}
	}
	return nil
}

func newTap(name string) (int, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return -1, err
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
	return fd, unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
}

func expectNetwork() error {
	for name, want := range map[string]string{"lo": "127.0.0.1/8", "eth0": "10.0.2.15/24"} {
		iface, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		addrs, err := iface.Addrs()
		if err != nil {
			return err
		}
		if iface.Flags&net.FlagUp == 0 || len(addrs) == 0 || addrs[0].String() != want {
			return errors.New(name + " is not up with " + want)
		}
	}
	routes, err := os.ReadFile("/proc/thread-self/net/route")
	if err != nil {
		return err
	}
	if !strings.Contains(string(routes), "eth0\t00000000\t0202000A") {
		return errors.New("no default route: " + string(routes))
	}
	return nil
}

func TestBootWithDiskOverlay(t *testing.T) {
	dev := newRootImage(t, map[string]string{"/etc/x": "lower\n"})
	image := newImage(t, "mkfs.ext4", "-q", "-F")
	for _, want := range []string{"lower\n", "upper\n"} {
		// A new copy each time: the kernel removes a namespace, and with it the
		// mount, some time after its last thread has ended.
		data, err := os.ReadFile(image)
		if err != nil {
			t.Fatal(err)
		}
		image = writeTestFile(t, filepath.Join(t.TempDir(), "copy.img"), string(data), 0o600)
		disk := attachLoop(t, image)
		dir := t.TempDir()
		onOwnThread(t, func() error {
			rootfs, err := fakeInitramfs(dir)
			if err != nil {
				return err
			}
			defer unix.Close(rootfs)
			m, err := boot(BootConfig{Root: dev, RootFSType: "erofs", Overlay: disk}, func(s string) { t.Log(s) })
			if err != nil {
				return err
			}
			if err := errors.Join(expectFile("/etc/x", want), os.WriteFile("/etc/x", []byte("upper\n"), 0o644), expectFreed(rootfs)); err != nil {
				return err
			}
			// The shutdown uses this to clean a disk that has no path any more.
			if err := unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
				return err
			}
			defer unix.Close(m.upper)
			return remountUpper(m.upper)
		})
		expectClean(t, image)
	}
}

func TestBootWithoutOverlay(t *testing.T) {
	folders := map[string]string{"/proc": "/", "/sys": "/", "/dev": "/", "/run": "/", "/tmp": "/", "/etc/x": "x\n"}
	good := newRootImage(t, folders)
	delete(folders, "/proc")
	noProc := newRootImage(t, folders)
	folders["/proc"] = "/"
	delete(folders, "/run")
	noRun := newRootImage(t, folders)
	folders["/run"] = "not a folder"
	badRun := newRootImage(t, folders)
	for _, c := range []struct{ dev, want string }{{good, ""}, {noProc, "/proc"}, {noRun, "/run"}, {badRun, "not a directory"}} {
		dir := t.TempDir()
		onOwnThread(t, func() error {
			rootfs, err := fakeInitramfs(dir)
			if err != nil {
				return err
			}
			defer unix.Close(rootfs)
			_, err = boot(BootConfig{Root: c.dev, RootFSType: "erofs", Overlay: OverlayNone}, func(s string) { t.Log(s) })
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					return errors.Join(errors.New("an image without a folder must not boot"), err)
				}
				t.Log(err)
				return nil
			}
			if err != nil {
				return err
			}
			if os.WriteFile("/etc/y", nil, 0o644) == nil {
				return errors.New("the root can be written to")
			}
			return errors.Join(expectMounted("/proc", "/tmp"), os.WriteFile("/tmp/y", nil, 0o644), expectFreed(rootfs))
		})
	}
}

func TestBootInInitramfs(t *testing.T) {
	dir := t.TempDir()
	onOwnThread(t, func() error {
		rootfs, err := fakeInitramfs(dir)
		if err != nil {
			return err
		}
		defer unix.Close(rootfs)
		line, err := os.ReadFile("/proc/cmdline")
		if err != nil {
			return err
		}
		if strings.Contains(string(line), "agentrun.") {
			// The test runs in a sandbox of ours, whose command line cannot be used
			// here.
			_, err = boot(BootConfig{}, func(s string) { t.Log(s) })
		} else {
			_, err = Boot(func(s string) { t.Log(s) })
		}
		if err != nil {
			return err
		}
		host, _ := os.Hostname()
		if host != "sandbox" {
			return errors.New("host name " + host)
		}
		return errors.Join(expectFile("/init", "init"), expectMounted("/proc", "/run", "/dev/pts"), expectFile("/etc/hostname", "sandbox\n"))
	})
}

func TestBootErrorsNameTheMount(t *testing.T) {
	dev := newRootImage(t, map[string]string{"/etc/x": "x"})
	for _, c := range []struct {
		cfg  BootConfig
		want []string
	}{
		{BootConfig{Root: "/dev/no-such", RootFSType: "erofs", Overlay: OverlayTmpfs}, []string{"/dev/no-such", lowerDir, "erofs", "not found"}},
		{BootConfig{Root: dev, RootFSType: "nofs", Overlay: OverlayTmpfs}, []string{dev, "nofs", "the kernel does not know"}},
		{BootConfig{Root: dev, RootFSType: "erofs", RootFlags: "nonsense", Overlay: OverlayTmpfs}, []string{"nonsense", "invalid"}},
		{BootConfig{Root: dev, RootFSType: "erofs", Overlay: "/dev/no-disk"}, []string{"/dev/no-disk", diskDir, "ext4"}},
		{BootConfig{Net: &NetConfig{Addr: [4]byte{10, 0, 0, 1}, Prefix: 24}}, []string{"eth0"}},
		{BootConfig{Hostname: "-"}, []string{"host name -"}},
	} {
		dir := t.TempDir()
		onOwnThread(t, func() error {
			rootfs, err := fakeInitramfs(dir)
			if err != nil {
				return err
			}
			defer unix.Close(rootfs)
			_, err = boot(c.cfg, func(s string) { t.Log(s) })
			if err == nil {
				return errors.New("booted")
			}
			t.Log(err)
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					return errors.New("error does not name " + w + ": " + err.Error())
				}
			}
			return nil
		})
	}
}

func TestInitramfsIsFreedOnlyInMemory(t *testing.T) {
	dir := t.TempDir() // on a disk, or a tmpfs of the host with one file of ours
	fd, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil || fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC {
		t.Fatalf("the root of this machine is in memory; not touching it (%v)", err)
	}
	writeTestFile(t, dir+"/file", "x", 0o600)
	if err := freeInitramfs(fd); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir + "/file"); err != nil {
		t.Fatal("a disk was emptied")
	}
}

func TestNamesAreLeftAlone(t *testing.T) {
	etc := t.TempDir()
	writeTestFile(t, etc+"/hosts", "1.2.3.4 box localhost # mine", 0o644)
	writeTestFile(t, etc+"/hostname", "image\n", 0o644)
	os.Symlink("/run/nowhere/resolv.conf", etc+"/resolv.conf")
	if err := errors.Join(writeNames(etc, "box"), writeResolvConf(etc, []string{"9.9.9.9"}),
		expectFile(etc+"/hosts", "1.2.3.4 box localhost # mine"), expectFile(etc+"/hostname", "image\n"),
		expectFile(etc+"/resolv.conf", "nameserver 9.9.9.9\n")); err != nil {
		t.Error(err)
	}
	os.Remove(etc + "/hosts")
	writeTestFile(t, etc+"/hostname", " \n", 0o644)
	if err := errors.Join(writeNames(etc, "box"), expectFile(etc+"/hostname", "box\n"),
		expectFile(etc+"/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tbox\n")); err != nil {
		t.Error(err)
	}
}
