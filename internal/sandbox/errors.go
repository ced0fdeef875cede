package sandbox

import (
	"errors"
	"fmt"
)

// Code says what kind of error it is. Clients branch on it.
type Code string

// The codes.
const (
	CodeInvalid       Code = "invalid"
	CodeNotFound      Code = "not_found"
	CodeExists        Code = "already_exists"
	CodeConflict      Code = "conflict"
	CodeDenied        Code = "permission_denied"
	CodeEnded         Code = "ended"
	CodeCapacity      Code = "insufficient_capacity"
	CodeNotReady      Code = "not_ready"
	CodePortClosed    Code = "port_closed"
	CodeUnimplemented Code = "unimplemented"
	CodeClosing       Code = "shutting_down"
	// CodeTooOld says that changes since a resource version are not kept any more.
	// CodeOtherState says that the node has never issued that resource version.
	CodeTooOld     Code = "too_old"
	CodeOtherState Code = "other_state"
	// CodeCordoned says that a node makes no sandboxes.
	CodeCordoned Code = "cordoned"
	CodeInternal Code = "internal"
)

// Error is an error as people and programs see it.
type Error struct {
	Code Code `json:"code"`
	// Message names the thing and the fault.
	Message string `json:"message"`
	// Cause is the reason, Remediation the next step; both may be empty.
	Cause       string `json:"cause,omitempty"`
	Remediation string `json:"remediation,omitempty"`

	wrapped error
}

// Errorf makes an error. With %w its text is part of the message.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), wrapped: errors.Unwrap(err)}
}

// Because adds the cause.
func (e *Error) Because(format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	e.Cause = err.Error()
	if w := errors.Unwrap(err); w != nil {
		e.wrapped = w
	}
	return e
}

// Try adds the next step.
func (e *Error) Try(format string, args ...any) *Error {
	e.Remediation = fmt.Sprintf(format, args...)
	return e
}

func (e *Error) Error() string {
	s := e.Message
	if e.Cause != "" {
		s += ": " + e.Cause
	}
	if e.Remediation != "" {
		s += ". " + e.Remediation
	}
	return s
}

func (e *Error) Unwrap() error { return e.wrapped }

// Is makes errors.Is(err, &Error{Code: c}) compare codes.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code && t.Message == ""
}

// HasCode reports whether err is, or wraps, an Error with this code.
func HasCode(err error, code Code) bool { return errors.Is(err, &Error{Code: code}) }

// NotFound is the error for an object that does not exist, or that the
// principal may not know of.
func NotFound(kind Kind, k Key) *Error {
	return Errorf(CodeNotFound, "%s %s does not exist in namespace %s", kind, k.Name, k.Namespace).
		Try("`agentrun get %s -n %s` lists those that do", kind.plural(), k.Namespace)
}

func (k Kind) plural() string {
	if k == KindSandbox {
		return "sandboxes"
	}
	return string(k) + "s"
}
