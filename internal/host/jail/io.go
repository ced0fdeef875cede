package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/cgroups/v3/cgroup2"
	"golang.org/x/sys/unix"
)

// Device is a block device, by its numbers. The zero Device is none.
type Device struct{ Major, Minor uint32 }

func (d Device) String() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// IO bounds what a process reads from and what it writes to a device, each in a
// second; a rate of 0 is no bound. It comes on top of what the process keeps to by
// itself: where the kernel cannot bound a device there is none.
type IO struct {
	Device                       Device
	BytesPerSecond, OpsPerSecond uint64
}

// DeviceOf finds the disk below a file. There is none, as said by the zero Device,
// for memory, for networks, and for file systems that lie on others or on several
// devices, as overlayfs and btrfs.
func DeviceOf(f *os.File) (Device, error) {
	info, err := f.Stat()
	if err != nil {
		return Device{}, fmt.Errorf("find the device of %s: %w", f.Name(), err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || unix.Major(st.Dev) == 0 { // such numbers are made up
		return Device{}, nil
	}
	d := Device{unix.Major(st.Dev), unix.Minor(st.Dev)}
	whole, err := d.disk()
	if errors.Is(err, fs.ErrNotExist) {
		return Device{}, nil // a container's sysfs may not show it
	}
	if err != nil {
		return Device{}, fmt.Errorf("find the disk of %s on %s: %w", f.Name(), d, err)
	}
	return whole, nil
}

// disk is what a partition is part of: the kernel bounds disks alone. The folder of
// a partition lies in that of its disk.
func (d Device) disk() (Device, error) {
	folder := path.Join("/sys/dev/block", d.String())
	if _, err := os.Stat(folder); err != nil {
		return Device{}, err
	}
	_, err := os.Stat(path.Join(folder, "partition"))
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil
	}
	if err != nil {
		return Device{}, err
	}
	// Not path.Join, which would take the last two away: the folder is a link.
	numbers, err := os.ReadFile(folder + "/../dev")
	if err != nil {
		return Device{}, err
	}
	major, minor, _ := strings.Cut(strings.TrimSpace(string(numbers)), ":")
	var whole [2]uint32
	for i, s := range []string{major, minor} {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			return Device{}, fmt.Errorf("numbers %q: %w", numbers, err)
		}
		whole[i] = uint32(n)
	}
	return Device{whole[0], whole[1]}, nil
}

// CheckIO says why what processes read from and write to a device is not bounded
// by their cgroups, or nil.
func (j *Jail) CheckIO(d Device) error {
	all, err := j.cells()
	if err != nil {
		return err
	}
	if all.groups == nil {
		return errors.New("this jail has no cgroups")
	}
	if d == (Device{}) {
		return errors.New("there is no block device below it that the kernel could bound")
	}
	return all.groups.tryIO(d)
}

// leastRate is the lowest that the kernel takes.
const leastRate = 2

// v2IO has all four bounds of a device.
func v2IO(l IO) *cgroup2.Resources {
	entry := func(kind cgroup2.IOType, rate uint64) cgroup2.Entry {
		if rate == 0 {
			rate = math.MaxUint64 // the kernel's "max"
		}
		return cgroup2.Entry{Type: kind, Major: int64(l.Device.Major), Minor: int64(l.Device.Minor), Rate: max(rate, leastRate)}
	}
	return &cgroup2.Resources{IO: &cgroup2.IO{Max: []cgroup2.Entry{
		entry(cgroup2.ReadBPS, l.BytesPerSecond), entry(cgroup2.WriteBPS, l.BytesPerSecond),
		entry(cgroup2.ReadIOPS, l.OpsPerSecond), entry(cgroup2.WriteIOPS, l.OpsPerSecond),
	}}}
}

// enableIO makes the io controller act on the groups beside m, and says whether
// there is one that bounds rates.
func enableIO(m *cgroup2.Manager, dir string) bool {
	if err := m.ToggleControllers([]string{"io"}, cgroup2.Enable); err != nil {
		return false
	}
	_, err := os.Stat(path.Join(dir, "io.max"))
	return err == nil
}

// setIO bounds a device, if that can be done at all.
func (g v2Group) setIO(l IO) error {
	if !g.io || l.Device == (Device{}) {
		return nil
	}
	err := g.Update(v2IO(l))
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil // it went away, or is of a kind that has no rates
	}
	if err != nil {
		return fmt.Errorf("set the cgroup's limits for device %s: %w", l.Device, err)
	}
	return nil
}

func (h *v2) tryIO(d Device) error {
	if !h.io {
		return errors.New("the io controller of cgroups v2 is missing, or not given to us")
	}
	trial := fmt.Sprintf("trial-io-%d", os.Getpid())
	g, err := h.create(trial)
	if err != nil {
		return err
	}
	err = g.(v2Group).Update(v2IO(IO{Device: d, BytesPerSecond: leastRate}))
	if err != nil {
		err = fmt.Errorf("the kernel bounds no rates of device %s: %w", d, err)
	}
	return errors.Join(err, h.remove(trial))
}

// tryIO refuses: v1's blkio sees of buffered writes only what the kernel's own
// threads write, long after and on nobody's account.
func (h *v1) tryIO(Device) error {
	return errors.New("these are cgroups v1, which do not slow buffered writes down")
}
