package agent

import (
	"bytes"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// maxAccountFile bounds how much is read of /etc/passwd and /etc/group. They
	// belong to the sandbox, which may have written anything into them.
	maxAccountFile = 1 << 20
	// maxGroups is NGROUPS_MAX of Linux since 2.6.4.
	maxGroups = 65536
)

// Identity is the user that a process runs as, or that a file is accessed as.
type Identity struct {
	UID, GID uint32
	Groups   []uint32 // supplementary
	Name     string   // "" when the uid has no passwd entry
	Home     string   // "" when unknown
	Shell    string   // "" when unknown
}

// root reports whether the identity has the agent's own rights. Supplementary
// groups add nothing to those.
func (id *Identity) root() bool { return id.UID == 0 && id.GID == 0 }

// Accounts reads users and groups. It caches nothing: the files may change at any
// time, and every fork would dirty a cache.
type Accounts struct {
	Passwd string // default /etc/passwd
	Group  string // default /etc/group
}

func (a Accounts) passwd() []byte { return readBounded(orDefault(a.Passwd, "/etc/passwd")) }
func (a Accounts) group() []byte  { return readBounded(orDefault(a.Group, "/etc/group")) }

func orDefault(s, def string) string {
	if s == "" {
		return def
	}
	return s
}

// Lookup resolves "name", "uid", "name:group", "uid:gid" and the mixtures. "" is
// root. As with Docker's USER, an unknown numeric uid gets gid 0, and naming a group
// drops the memberships in /etc/group. A missing file counts as empty: numeric ids
// and root work without it.
func (a Accounts) Lookup(spec string) (Identity, error) {
	if len(spec) > 256 || strings.IndexByte(spec, 0) >= 0 {
		return Identity{}, fail(ErrBadUser, "look up user", "", "longer than 256 bytes, or holds a zero byte")
	}
	user, group, hasGroup := strings.Cut(spec, ":")
	if spec == "" {
		user = "root"
	}
	if user == "" || (hasGroup && group == "") {
		return Identity{}, fail(ErrBadUser, "look up user", spec, "want name, uid, name:group or uid:gid")
	}
	id, err := a.lookupUser(user)
	if err != nil {
		return Identity{}, err
	}
	if !hasGroup {
		if id.Name != "" {
			id.Groups = memberships(a.group(), id.Name, id.GID)
		}
		return id, nil
	}
	id.GID, err = a.LookupGroup(group)
	return id, err
}

func (a Accounts) lookupUser(user string) (Identity, error) {
	num, isNum := parseID(user)
	var byID Identity
	found := false
	for line := range lines(a.passwd()) {
		e, ok := parsePasswdLine(line)
		if !ok {
			continue
		}
		if e.Name == user { // a name wins over a number, even a name of digits
			return e, nil
		}
		if isNum && e.UID == num && !found {
			byID, found = e, true
		}
	}
	switch {
	case found:
		return byID, nil
	case isNum && num == 0, user == "root":
		return Identity{Name: "root", Home: "/root", Shell: "/bin/sh"}, nil
	case isNum:
		return Identity{UID: num, Home: "/"}, nil
	}
	return Identity{}, fail(ErrBadUser, "look up user", user, "no such user in "+orDefault(a.Passwd, "/etc/passwd"))
}

// LookupGroup resolves a group's name or number.
func (a Accounts) LookupGroup(group string) (uint32, error) {
	for line := range lines(a.group()) {
		if g, ok := parseGroupLine(line); ok && string(g.name) == group {
			return g.gid, nil
		}
	}
	if gid, ok := parseID(group); ok {
		return gid, nil
	}
	if group == "root" {
		return 0, nil
	}
	return 0, fail(ErrBadUser, "look up group", group, "no such group in "+orDefault(a.Group, "/etc/group"))
}

// nameCache caches the names of one call (a listing has few owners).
type nameCache struct {
	accounts      Accounts
	passwd, group []byte
	loaded        bool
	users, groups map[uint32]string
}

func (c *nameCache) names(uid, gid uint32) (string, string) {
	if !c.loaded {
		c.loaded = true
		c.passwd, c.group = c.accounts.passwd(), c.accounts.group()
		c.users, c.groups = make(map[uint32]string, 2), make(map[uint32]string, 2)
	}
	u, ok := c.users[uid]
	if !ok {
		for line := range lines(c.passwd) {
			if e, valid := parsePasswdLine(line); valid && e.UID == uid {
				u = e.Name
				break
			}
		}
		c.users[uid] = u
	}
	g, ok := c.groups[gid]
	if !ok {
		for line := range lines(c.group) {
			if e, valid := parseGroupLine(line); valid && e.gid == gid {
				g = string(e.name)
				break
			}
		}
		c.groups[gid] = g
	}
	return u, g
}

// parsePasswdLine reads name:password:uid:gid:gecos:home:shell (passwd(5)).
func parsePasswdLine(line []byte) (Identity, bool) {
	var f [7][]byte
	if !fields(line, f[:]) || len(f[0]) == 0 {
		return Identity{}, false
	}
	uid, ok1 := parseID(string(f[2]))
	gid, ok2 := parseID(string(f[3]))
	if !ok1 || !ok2 {
		return Identity{}, false
	}
	return Identity{UID: uid, GID: gid, Name: string(f[0]), Home: string(f[5]), Shell: string(f[6])}, true
}

type groupLine struct {
	name    []byte
	gid     uint32
	members []byte // comma separated
}

// parseGroupLine reads name:password:gid:members (group(5)).
func parseGroupLine(line []byte) (groupLine, bool) {
	var f [4][]byte
	if !fields(line, f[:]) || len(f[0]) == 0 {
		return groupLine{}, false
	}
	gid, ok := parseID(string(f[2]))
	return groupLine{f[0], gid, f[3]}, ok
}

// memberships lists the groups that name user, without its primary group.
func memberships(group []byte, user string, primary uint32) []uint32 {
	var ids []uint32
next:
	for line := range lines(group) {
		g, ok := parseGroupLine(line)
		if !ok || g.gid == primary {
			continue
		}
		for rest, more := g.members, true; more; {
			var m []byte
			m, rest, more = bytes.Cut(rest, []byte{','})
			if string(m) != user {
				continue
			}
			for _, have := range ids {
				if have == g.gid {
					continue next
				}
			}
			if len(ids) == maxGroups {
				return ids
			}
			ids = append(ids, g.gid)
			continue next
		}
	}
	return ids
}

// fields cuts a colon-separated line into exactly len(out) fields.
func fields(line []byte, out [][]byte) bool {
	for i := range out {
		f, rest, more := bytes.Cut(line, []byte{':'})
		if more != (i < len(out)-1) {
			return false
		}
		out[i], line = f, rest
	}
	return true
}

// lines iterates over the lines of data, without comments and empty ones.
func lines(data []byte) func(func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for len(data) > 0 {
			line, rest, _ := bytes.Cut(data, []byte{'\n'})
			data = rest
			line = bytes.TrimSuffix(line, []byte{'\r'})
			if len(line) > 0 && line[0] != '#' && !yield(line) {
				return
			}
		}
	}
}

// parseID reads a uid or gid. 2³²-1 is "no id" to the kernel and is refused.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 1<<32-1 || s[0] == '+' {
		return 0, false
	}
	return uint32(n), true
}

// readBounded reads a small regular file. A missing file, a FIFO in its place and a
// file that is too large all read as empty.
func readBounded(name string) []byte {
	data, err := readFile(name, maxAccountFile)
	if err != nil {
		return nil
	}
	return data
}

// readFile reads a regular file of at most limit bytes. It never blocks, whatever
// kind of file it finds.
func readFile(name string, limit int) ([]byte, error) {
	return readFileAt(unix.AT_FDCWD, name, 0, limit)
}

func readFileAt(dirfd int, name string, flags, limit int) ([]byte, error) {
	fd, err := open(dirfd, name, flags|unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, ErrNotRegular
	}
	// Files of /proc report size 0. The buffer grows until a read returns no bytes.
	size := 512
	if st.Size > 0 && st.Size < int64(limit) {
		size = int(st.Size) + 1
	}
	buf := make([]byte, 0, size)
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := unix.Read(fd, buf[len(buf):cap(buf)])
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return buf, nil
		}
		buf = buf[:len(buf)+n]
		if len(buf) > limit {
			return nil, ErrTooLarge
		}
	}
}

// open is openat(2) with close-on-exec, repeated when a signal interrupts it.
func open(dirfd int, name string, flags int, mode uint32) (int, error) {
	for {
		fd, err := unix.Openat(dirfd, name, flags|unix.O_CLOEXEC, mode)
		if err != syscall.EINTR {
			return fd, err
		}
	}
}
