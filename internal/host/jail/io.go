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

// Device is a block device, by its numbers. The zero Device means no device.
type Device struct{ Major, Minor uint32 }

func (d Device) String() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// IO bounds how much a process reads from a device and how much it writes to it,
// each per second; a rate of 0 is unbounded. The vmm limits its own rates as well.
// If the kernel cannot bound the device, that is the only limit.
type IO struct {
	Device                       Device
	BytesPerSecond, OpsPerSecond uint64
}

// DeviceOf finds the disk below a file. It returns the zero Device for files in
// memory, on networks, and on file systems that lie on other file systems or on
// several devices, such as overlayfs and btrfs.
func DeviceOf(f *os.File) (Device, error) {
	info, err := f.Stat()
	if err != nil {
		return Device{}, fmt.Errorf("find the device of %s: %w", f.Name(), err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || unix.Major(st.Dev) == 0 { // the kernel makes these numbers up
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

// disk returns the disk of a partition, or the device itself: the kernel bounds
// only whole disks. The sysfs folder of a partition lies in the folder of its disk.
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
	// Not path.Join, which would resolve the "..": the folder is a link.
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

// CheckIO reports why cgroups do not bound the reads and writes of processes on
// a device, or nil.
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

// leastRate is the lowest rate that the kernel accepts.
const leastRate = 2

// v2IO sets all four bounds of a device.
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

// enableIO enables the io controller for the groups beside m, and reports
// whether it bounds rates.
func enableIO(m *cgroup2.Manager, dir string) bool {
	if err := m.ToggleControllers([]string{"io"}, cgroup2.Enable); err != nil {
		return false
	}
	_, err := os.Stat(path.Join(dir, "io.max"))
	return err == nil
}

// setIO bounds a device, if the kernel can.
func (g v2Group) setIO(l IO) error {
	if !g.io || l.Device == (Device{}) {
		return nil
	}
	err := g.Update(v2IO(l))
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil // the device went away, or its kind has no rates
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

// tryIO always refuses. For buffered writes v1's blkio sees only the kernel's
// own writeback threads: long after the write, and charged to no group.
func (h *v1) tryIO(Device) error {
	return errors.New("these are cgroups v1, which do not slow buffered writes down")
}
