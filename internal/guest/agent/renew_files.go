package agent

import (
	"bytes"
	"syscall"

	"golang.org/x/sys/unix"
)

// rename changes the host name, in the kernel and in the files that boot writes it
// to. A file that is missing, or that is a link, is left to the image.
func (r *Renewer) rename(name string) error {
	var uts unix.Utsname
	if err := rawUname(&uts); err != nil {
		return failed("read", "host name", err)
	}
	old, _, _ := bytes.Cut(uts.Nodename[:], []byte{0})
	if err := r.setHostname(name); err != nil {
		return err
	}
	err := r.put(keptHostname, append(append(r.scratch[:0], name...), '\n'), func(text []byte) error {
		return r.inEtc(func(etc int) error {
			var st unix.Stat_t
			if !isRegular(etc, "hostname", &st) {
				return nil
			}
			return replaceFile(etc, "hostname", text, st.Mode&modeBits)
		})
	})
	if err != nil {
		return cannotReplace("/etc/hostname", err)
	}
	if hosts, ok := r.contents(keptHosts); ok {
		err = r.overwrite(keptHosts, int64(len(hosts)), renameInHosts(r.scratch[:0], hosts, old, name))
	} else {
		err = r.inEtc(func(etc int) error { return replaceInHosts(etc, old, name) })
	}
	if err != nil {
		return cannotReplace("/etc/hosts", err)
	}
	return nil
}

// replaceInHosts makes a new hosts file with the new name.
func replaceInHosts(etc int, old []byte, name string) error {
	var st unix.Stat_t
	if !isRegular(etc, "hosts", &st) || st.Size > maxAccountFile {
		return nil // boot has not written to it either
	}
	hosts, err := readFileAt(etc, "hosts", unix.O_NOFOLLOW, maxAccountFile)
	if err != nil {
		return err
	}
	text := renameInHosts(nil, hosts, old, name)
	if bytes.Equal(text, hosts) {
		return nil
	}
	return replaceFile(etc, "hosts", text, st.Mode&modeBits)
}

// renameInHosts appends hosts to text, which is empty, and replaces the line that was
// added for the old name. Lines of the image stay.
func renameInHosts(text, hosts, old []byte, name string) []byte {
	for renamed := false; len(hosts) > 0; {
		n := bytes.IndexByte(hosts, '\n') + 1
		if n == 0 {
			n = len(hosts)
		}
		if !renamed && isHostLine(hosts[:n], old) {
			text, renamed = appendHostLine(text, name), true
		} else {
			text = append(text, hosts[:n]...)
		}
		hosts = hosts[n:]
	}
	return withNames(text, name)
}

// isHostLine reports whether a line is the one that appendHostLine adds.
func isHostLine(line, name []byte) bool {
	n := len(hostAddress)
	return len(line) == n+len(name)+1 && line[len(line)-1] == '\n' &&
		string(line[:n]) == hostAddress && bytes.Equal(line[n:len(line)-1], name)
}

// inEtc calls fn with /etc, if it exists. A link is not followed.
func (r *Renewer) inEtc(fn func(etc int) error) error {
	etc, err := open(unix.AT_FDCWD, r.root+"/etc", unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err == syscall.ENOENT {
		return nil
	}
	if err != nil {
		return failed("open", "/etc", err)
	}
	defer unix.Close(etc)
	return fn(etc)
}

// cannotReplace says why a fork cannot be made, and names the next step.
func cannotReplace(path string, err error) error {
	switch kindOf(err) {
	case ErrReadOnly:
		return fail(ErrReadOnly, "replace", path, "boot the template with a root that can be written, such as agentrun.overlay=tmpfs")
	case ErrNoSpace:
		return fail(ErrNoSpace, "replace", path, "make room in the template before it is forked")
	}
	return failed("replace", path, err)
}

// replaceGeneration makes the file that tells programs about a fork.
func replaceGeneration(root string, text []byte) error {
	const folder, name = "/run/agentrun", "generation"
	if err := mkdirExact(root+folder, 0o755); err != nil && err != syscall.EEXIST {
		return failed("make folder", folder, err)
	}
	dir, err := open(unix.AT_FDCWD, root+folder, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return failed("open", folder, err)
	}
	defer unix.Close(dir)
	return failed("replace", folder+"/"+name, replaceFile(dir, name, text, generationMode))
}

const generationMode = 0o444

// isRegular reports whether name itself is a regular file in dir; a link is not
// followed.
func isRegular(dir int, name string, st *unix.Stat_t) bool {
	return unix.Fstatat(dir, name, st, unix.AT_SYMLINK_NOFOLLOW) == nil && fileType(st.Mode) == TypeFile
}

// replaceFile atomically replaces name in dir with a new file. A regular file passes
// its owner on. A link is replaced, never followed.
func replaceFile(dir int, name string, data []byte, mode uint32) error {
	fd, temp, err := makeTemp(dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err = fillReplacement(fd, dir, name, data, mode); err == nil {
		err = unix.Renameat(dir, temp, dir, name)
	}
	if err != nil {
		_ = unix.Unlinkat(dir, temp, 0) // best effort: nobody knows the name
		return err
	}
	return syncFolder(dir)
}

func fillReplacement(fd, dir int, name string, data []byte, mode uint32) error {
	var old unix.Stat_t
	if isRegular(dir, name, &old) {
		if err := unix.Fchown(fd, int(old.Uid), int(old.Gid)); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		return err
	}
	for len(data) > 0 {
		n, err := unix.Write(fd, data)
		if err != nil && err != syscall.EINTR {
			return err
		}
		data = data[max(n, 0):]
	}
	return fsync(fd)
}
