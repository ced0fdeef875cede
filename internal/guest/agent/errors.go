package agent

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// Kind says what went wrong in a form that callers can branch on with errors.Is. A
// Kind is a constant, so it cannot be changed.
type Kind string

func (k Kind) Error() string { return string(k) }

// The kinds of failure.
const (
	ErrInvalid        = Kind("invalid argument")
	ErrNotFound       = Kind("not found")
	ErrExists         = Kind("already exists")
	ErrPermission     = Kind("permission denied")
	ErrIsDirectory    = Kind("is a directory")
	ErrNotDirectory   = Kind("not a directory")
	ErrNotEmpty       = Kind("directory not empty")
	ErrNotRegular     = Kind("not a regular file")
	ErrReadOnly       = Kind("read-only filesystem")
	ErrNoSpace        = Kind("no space left")
	ErrBusy           = Kind("busy")
	ErrTooLarge       = Kind("too large")
	ErrBadUser        = Kind("bad user")
	ErrBadDir         = Kind("bad working directory")
	ErrBadInterpreter = Kind("missing interpreter")
	ErrNotExecutable  = Kind("not executable")
	ErrDuplicateID    = Kind("duplicate exec id")
	ErrTooMany        = Kind("too many")
	ErrEnded          = Kind("process has ended")
	ErrClosed         = Kind("closed")
	ErrStopped        = Kind("stopped by the caller")
	ErrWouldBlock     = Kind("nothing to read yet")
	ErrShuttingDown   = Kind("shutting down")
	ErrUnsupported    = Kind("not supported")
	ErrIO             = Kind("input/output error")
)

// Error is every error of this package: the operation, the thing, and the cause.
// errors.Is matches its Kind and its cause.
type Error struct {
	Kind  Kind
	Op    string // verb: "start", "open", "mount"
	Thing string // the path, id, user or device meant
	Cause error  // may be nil
}

func (e *Error) Error() string {
	s := e.Op
	if e.Thing != "" {
		s += " " + e.Thing
	}
	s += ": " + string(e.Kind)
	if e.Cause != nil {
		if c := e.Cause.Error(); c != string(e.Kind) {
			s += ": " + c
		}
	}
	return s
}

// Unwrap lets errors.Is find both the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Cause}
}

func fail(kind Kind, op, thing, why string) error {
	e := &Error{Kind: kind, Op: op, Thing: thing}
	if why != "" {
		e.Cause = errors.New(why)
	}
	return e
}

// failed wraps a system error and derives the kind from it. An error of this package
// keeps its own text.
func failed(op, thing string, err error) error {
	if err == nil {
		return nil
	}
	var own *Error
	if errors.As(err, &own) {
		return err
	}
	return &Error{Kind: kindOf(err), Op: op, Thing: thing, Cause: err}
}

func kindOf(err error) Kind {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		switch {
		case errors.Is(err, os.ErrClosed):
			return ErrClosed
		case errors.Is(err, fs.ErrNotExist):
			return ErrNotFound
		}
		return ErrIO
	}
	switch errno {
	case syscall.ENOENT, syscall.ESRCH, syscall.ENXIO, syscall.ENODEV:
		return ErrNotFound
	case syscall.EEXIST:
		return ErrExists
	case syscall.EACCES, syscall.EPERM:
		return ErrPermission
	case syscall.EISDIR:
		return ErrIsDirectory
	case syscall.ENOTDIR:
		return ErrNotDirectory
	case syscall.ENOTEMPTY:
		return ErrNotEmpty
	case syscall.EROFS:
		return ErrReadOnly
	case syscall.ENOSPC, syscall.EDQUOT:
		return ErrNoSpace
	case syscall.EBUSY, syscall.ETXTBSY:
		return ErrBusy
	case syscall.EFBIG, syscall.E2BIG, syscall.ENAMETOOLONG:
		return ErrTooLarge
	case syscall.EMFILE, syscall.ENFILE, syscall.EMLINK, syscall.ENOMEM:
		return ErrTooMany
	case syscall.EINVAL, syscall.ELOOP:
		return ErrInvalid
	case syscall.EAGAIN:
		return ErrWouldBlock
	case syscall.ENOSYS, syscall.EOPNOTSUPP:
		return ErrUnsupported
	case syscall.EPIPE:
		return ErrClosed
	}
	return ErrIO
}
