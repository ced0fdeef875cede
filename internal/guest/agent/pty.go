package agent

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// openTerminal makes a pseudo-terminal of the given size for user id. The
// master does not block; the slave is opened through the master, so that it
// works wherever devpts is mounted.
func openTerminal(rows, cols uint16, id *Identity) (master *os.File, slave int, err error) {
	fd, err := open(unix.AT_FDCWD, "/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, -1, failed("open terminal", "/dev/ptmx", err)
	}
	// From here on the descriptor belongs to the file.
	master = os.NewFile(uintptr(fd), "terminal")
	defer func() {
		if err != nil {
			_ = master.Close() // the first error is returned
		}
	}()
	if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, -1, failed("unlock terminal", "/dev/ptmx", err)
	}
	if err = setSize(fd, rows, cols); err != nil {
		return nil, -1, err
	}
	peer, _, errno := syscall.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, -1, failed("open terminal", "slave of /dev/ptmx", errno)
	}
	slave = int(peer)
	// A program must be able to reopen its own terminal by name.
	if err = unix.Fchown(slave, int(id.UID), ttyGroup(id)); err == nil {
		err = unix.Fchmod(slave, 0o620)
	}
	if err == nil {
		err = setUTF8(slave)
	}
	if err != nil {
		unix.Close(slave)
		return nil, -1, failed("prepare terminal", "slave of /dev/ptmx", err)
	}
	return master, slave, nil
}

// ttyGroup keeps the group that devpts chose (gid=5, "tty") for ordinary users.
func ttyGroup(id *Identity) int {
	if id.root() {
		return 0
	}
	return -1
}

func setUTF8(fd int) error {
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return err
	}
	t.Iflag |= unix.IUTF8 // erase removes a character, not a byte of it
	return unix.IoctlSetTermios(fd, unix.TCSETS, t)
}

// setSize sets the window size; the kernel sends SIGWINCH to the foreground
// process group when it changes.
func setSize(fd int, rows, cols uint16) error {
	if rows == 0 {
		rows = 24
	}
	if cols == 0 {
		cols = 80
	}
	err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
	return failed("resize terminal", "", err)
}
