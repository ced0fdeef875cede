package agent

import (
	"errors"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	maxArgs    = 1 << 16
	maxID      = 128
	maxPathLen = unix.PathMax
)

func checkSpec(spec *ExecSpec) error {
	if len(spec.Argv) == 0 || spec.Argv[0] == "" {
		return fail(ErrInvalid, "start exec", spec.ID, "no program given")
	}
	if len(spec.Argv) > maxArgs {
		return fail(ErrTooLarge, "start", spec.Argv[0], "more than 65536 arguments")
	}
	for _, a := range spec.Argv {
		if strings.IndexByte(a, 0) >= 0 {
			return fail(ErrInvalid, "start exec", spec.ID, "an argument holds a zero byte")
		}
	}
	if len(spec.ID) > maxID || strings.ContainsFunc(spec.ID, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return fail(ErrInvalid, "start", spec.Argv[0], "the id is longer than 128 bytes or holds control characters")
	}
	if spec.Workdir != "" && (spec.Workdir[0] != '/' || strings.IndexByte(spec.Workdir, 0) >= 0) {
		return fail(ErrBadDir, "start", spec.Argv[0], "the working directory must be an absolute path")
	}
	if spec.Timeout < 0 {
		return fail(ErrInvalid, "start", spec.Argv[0], "the timeout is negative")
	}
	return checkEnv(spec.Env)
}

func checkEnv(env []string) error {
	if len(env) > maxArgs {
		return fail(ErrTooLarge, "set environment", "", "more than 65536 variables")
	}
	for _, kv := range env {
		if i := strings.IndexByte(kv, '='); i <= 0 || strings.IndexByte(kv, 0) >= 0 {
			name := kv
			if i >= 0 {
				name = kv[:i] // never the value: it may be a secret
			}
			return fail(ErrInvalid, "set environment", name, "want NAME=value without zero bytes")
		}
	}
	return nil
}

// buildEnv builds the environment of an exec. The user's passwd entry gives the
// defaults; the base environment and then the exec's own variables override them. It
// also returns PATH.
func buildEnv(spec *ExecSpec, base []string, id *Identity) (env []string, path string) {
	if spec.CleanEnv {
		base = nil
	}
	env = make([]string, 0, 6+len(base)+len(spec.Env))
	place := make(map[string]int, cap(env))
	set := func(kv string) {
		name, _, _ := strings.Cut(kv, "=")
		if i, ok := place[name]; ok {
			env[i] = kv
			return
		}
		place[name] = len(env)
		env = append(env, kv)
	}
	set("PATH=" + DefaultPath)
	if spec.TTY {
		set("TERM=xterm-256color")
	}
	if id.Home != "" {
		set("HOME=" + id.Home)
	}
	if id.Name != "" {
		set("USER=" + id.Name)
		set("LOGNAME=" + id.Name)
	}
	if id.Shell != "" {
		set("SHELL=" + id.Shell)
	}
	for _, kv := range base {
		set(kv)
	}
	for _, kv := range spec.Env {
		set(kv)
	}
	_, path, _ = strings.Cut(env[place["PATH"]], "=")
	return env, path
}

// resolve finds the working directory and the program, with the user's rights. The
// child would report the same errno for either.
func resolve(spec *ExecSpec, id *Identity, path string) (dir, program string, err error) {
	err = id.do(func() error {
		if dir, err = findDir(spec, id); err != nil {
			return err
		}
		program, err = findProgram(spec.Argv[0], dir, path)
		return err
	})
	return dir, program, err
}

func findDir(spec *ExecSpec, id *Identity) (string, error) {
	if spec.Workdir == "" {
		if id.Home != "" && id.Home[0] == '/' && usableDir(id.Home) == nil {
			return id.Home, nil
		}
		return "/", nil
	}
	if err := usableDir(spec.Workdir); err != nil {
		return "", &Error{Kind: ErrBadDir, Op: "enter", Thing: spec.Workdir, Cause: err}
	}
	return spec.Workdir, nil
}

// usableDir says why chdir(2) to dir would fail.
func usableDir(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return syscall.ENOTDIR
	}
	return access(dir, unix.X_OK)
}

// findProgram looks name up as execvp(3) does: a name with a slash is relative to the
// working directory, any other is searched for in PATH. Of several failures it
// reports the most specific, so that a file without its x bit is not "not found".
func findProgram(name, dir, path string) (string, error) {
	if strings.IndexByte(name, '/') >= 0 {
		full := name
		if name[0] != '/' {
			full = dir + "/" + name
		}
		if err := usableProgram(full); err != nil {
			return "", failed("start", name, err)
		}
		return full, nil
	}
	worst := fail(ErrNotFound, "start", name, "not in PATH "+path)
	for more := true; more; {
		var elem string
		elem, path, more = strings.Cut(path, ":")
		if elem == "" || elem[0] != '/' {
			elem = dir + "/" + elem
		}
		full := strings.TrimSuffix(elem, "/") + "/" + name
		if len(full) >= maxPathLen {
			continue
		}
		err := usableProgram(full)
		if err == nil {
			return full, nil
		}
		if !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrIsDirectory) && errors.Is(worst, ErrNotFound) {
			worst = err
		}
	}
	return "", worst
}

func usableProgram(full string) error {
	var st unix.Stat_t
	if err := unix.Stat(full, &st); err != nil {
		if err == syscall.ENOTDIR {
			err = syscall.ENOENT
		}
		return failed("start", full, err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		return fail(ErrIsDirectory, "start", full, "")
	default:
		return fail(ErrNotExecutable, "start", full, "not a regular file")
	}
	if err := access(full, unix.X_OK); err != nil {
		return &Error{Kind: ErrPermission, Op: "start", Thing: full, Cause: err}
	}
	return nil
}

// access is faccessat2(2) with AT_EACCESS, which asks for the thread's own
// filesystem rights; plain access(2) would ask for root's.
func access(path string, mode uint32) error {
	return unix.Faccessat(unix.AT_FDCWD, path, mode, unix.AT_EACCESS)
}

// startError explains the errno that the child reported. The program and the
// directory existed a moment ago, which resolves ambiguous numbers.
func startError(program, dir string, err error) error {
	switch err {
	case syscall.ENOENT:
		return fail(ErrBadInterpreter, "start", program, "the interpreter or dynamic loader it names does not exist")
	case syscall.ENOEXEC:
		return &Error{Kind: ErrNotExecutable, Op: "start", Thing: program, Cause: err}
	case syscall.ENOTDIR:
		return &Error{Kind: ErrBadDir, Op: "enter", Thing: dir, Cause: err}
	}
	return failed("start", program, err)
}
