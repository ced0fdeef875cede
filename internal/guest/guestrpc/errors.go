package guestrpc

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"syscall"

	"agentrun.dev/internal/codec"
)

// Code classifies an error that is sent to the other side.
type Code uint8

// The codes. Their numbers are part of the protocol.
const (
	CodeInternal           Code = 1
	CodeNotFound           Code = 2
	CodeAlreadyExists      Code = 3
	CodeInvalidArgument    Code = 4
	CodePermissionDenied   Code = 5
	CodeFailedPrecondition Code = 6
	CodeDeadlineExceeded   Code = 7
	CodeUnavailable        Code = 8
	CodeResourceExhausted  Code = 9
	CodeAborted            Code = 10
)

var codeNames = [...]string{
	CodeInternal:           "internal",
	CodeNotFound:           "not_found",
	CodeAlreadyExists:      "already_exists",
	CodeInvalidArgument:    "invalid_argument",
	CodePermissionDenied:   "permission_denied",
	CodeFailedPrecondition: "failed_precondition",
	CodeDeadlineExceeded:   "deadline_exceeded",
	CodeUnavailable:        "unavailable",
	CodeResourceExhausted:  "resource_exhausted",
	CodeAborted:            "aborted",
}

func (c Code) String() string {
	if int(c) < len(codeNames) && codeNames[c] != "" {
		return codeNames[c]
	}
	return codeNames[CodeInternal]
}

// Error is the failure of one call: the error that the handler on the other end
// returned, or the reason why the call could not be made.
type Error struct {
	Code    Code
	Message string

	cause error // on this end only, not sent
}

// Unwrap returns the error that broke the connection, if that is why the call failed.
func (e *Error) Unwrap() error { return e.cause }

func (e *Error) Error() string {
	if e.Message == "" {
		return e.Code.String()
	}
	return e.Message + " (" + e.Code.String() + ")"
}

// Is makes errors.Is work with the standard library's sentinels.
func (e *Error) Is(target error) bool {
	switch target {
	case fs.ErrNotExist:
		return e.Code == CodeNotFound
	case fs.ErrExist:
		return e.Code == CodeAlreadyExists
	case fs.ErrPermission:
		return e.Code == CodePermissionDenied
	case fs.ErrInvalid:
		return e.Code == CodeInvalidArgument
	case context.DeadlineExceeded:
		return e.Code == CodeDeadlineExceeded
	}
	return false
}

// newError joins the parts of a message without fmt, which the agent avoids.
func newError(code Code, parts ...string) *Error {
	return &Error{Code: code, Message: strings.Join(parts, "")}
}

// ErrorFrom gives any error a code. An *Error keeps its own. The sentinels of io/fs
// and context and the common errno values have codes of their own. All other errors
// are internal.
func ErrorFrom(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		if e == err { //nolint:errorlint // identity is meant: a wrapped one keeps the words around it
			return e
		}
		return &Error{Code: e.Code, Message: err.Error()}
	}
	return &Error{Code: codeFrom(err), Message: err.Error()}
}

func codeFrom(err error) Code {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		if c, ok := codeFromErrno(errno); ok {
			return c
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return CodeNotFound
	case errors.Is(err, fs.ErrExist):
		return CodeAlreadyExists
	case errors.Is(err, fs.ErrPermission):
		return CodePermissionDenied
	case errors.Is(err, fs.ErrInvalid):
		return CodeInvalidArgument
	case errors.Is(err, context.DeadlineExceeded):
		return CodeDeadlineExceeded
	case errors.Is(err, context.Canceled):
		return CodeAborted
	}
	return CodeInternal
}

func codeFromErrno(errno syscall.Errno) (Code, bool) {
	switch errno {
	case syscall.ENOENT, syscall.ESRCH:
		return CodeNotFound, true
	case syscall.EEXIST:
		return CodeAlreadyExists, true
	case syscall.EINVAL, syscall.ENAMETOOLONG, syscall.ELOOP, syscall.E2BIG, syscall.ENOEXEC:
		return CodeInvalidArgument, true
	case syscall.EACCES, syscall.EPERM, syscall.EROFS:
		return CodePermissionDenied, true
	case syscall.ENOTDIR, syscall.EISDIR, syscall.ENOTEMPTY, syscall.EBUSY, syscall.EXDEV, syscall.ETXTBSY:
		return CodeFailedPrecondition, true
	case syscall.ENOSPC, syscall.EDQUOT, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN, syscall.EFBIG:
		return CodeResourceExhausted, true
	case syscall.ETIMEDOUT:
		return CodeDeadlineExceeded, true
	}
	return 0, false
}

// ProtocolError says that the peer sent something that a correct peer can not
// send. The session has been closed.
type ProtocolError struct {
	Reason string
}

func (e *ProtocolError) Error() string { return "guest protocol violated by peer: " + e.Reason }

func violation(reason string) error { return &ProtocolError{Reason: reason} }

// maxErrorMessage bounds the text of an error that is sent.
const maxErrorMessage = 2048

const errorVersion = 1

// appendError encodes the payload of RESET and GOAWAY.
func appendError(b []byte, e *Error) []byte {
	enc := codec.NewEncoder(b)
	enc.Version(errorVersion)
	enc.Uvarint(uint64(e.Code))
	enc.String(e.Message[:min(len(e.Message), maxErrorMessage)])
	return enc.Bytes()
}

// decodeError decodes an error. Unknown codes, which newer peers may send, become
// internal.
func decodeError(b []byte) (*Error, error) {
	d := codec.NewDecoder(b)
	d.Version(errorVersion)
	code := d.Uvarint()
	e := &Error{Code: CodeInternal, Message: d.String(maxErrorMessage)}
	if err := d.Finish(); err != nil {
		return nil, err
	}
	if code > 0 && code < uint64(len(codeNames)) {
		e.Code = Code(code)
	}
	return e, nil
}
