package server

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// Codes of errors that sandboxes have no part in.
const (
	CodeMethod   sandbox.Code = "method_not_allowed"
	CodeAccept   sandbox.Code = "not_acceptable"
	CodeTooLarge sandbox.Code = "too_large"
	CodeMedia    sandbox.Code = "unsupported_media_type"
	CodeTimeout  sandbox.Code = "timeout"
	CodeAudit    sandbox.Code = "audit_failed"
)

// Codes of errors in a sandbox.
const (
	CodeCannotRun   sandbox.Code = "cannot_run"
	CodeNoFile      sandbox.Code = "file_not_found"
	CodeFileExists  sandbox.Code = "file_exists"
	CodeFileDenied  sandbox.Code = "file_denied"
	CodeExhausted   sandbox.Code = "resource_exhausted"
	CodeUnavailable sandbox.Code = "unavailable"
)

// statuses has the HTTP status of each code.
var statuses = map[sandbox.Code]int{
	sandbox.CodeInvalid:        http.StatusBadRequest,
	access.CodeUnauthenticated: http.StatusUnauthorized,
	sandbox.CodeDenied:         http.StatusForbidden,
	CodeFileDenied:             http.StatusForbidden,
	sandbox.CodeNotFound:       http.StatusNotFound,
	CodeNoFile:                 http.StatusNotFound,
	CodeMethod:                 http.StatusMethodNotAllowed,
	CodeAccept:                 http.StatusNotAcceptable,
	sandbox.CodeExists:         http.StatusConflict,
	CodeFileExists:             http.StatusConflict,
	sandbox.CodeConflict:       http.StatusConflict,
	sandbox.CodeEnded:          http.StatusGone,
	sandbox.CodeTooOld:         http.StatusGone,
	sandbox.CodeOtherState:     http.StatusConflict,
	CodeTooLarge:               http.StatusRequestEntityTooLarge,
	CodeMedia:                  http.StatusUnsupportedMediaType,
	CodeCannotRun:              http.StatusUnprocessableEntity,
	sandbox.CodeCapacity:       http.StatusServiceUnavailable,
	sandbox.CodeNotReady:       http.StatusServiceUnavailable,
	sandbox.CodeClosing:        http.StatusServiceUnavailable,
	sandbox.CodeCordoned:       http.StatusServiceUnavailable,
	CodeAudit:                  http.StatusServiceUnavailable,
	CodeExhausted:              http.StatusInsufficientStorage,
	CodeTimeout:                http.StatusRequestTimeout,
	CodeUnavailable:            http.StatusBadGateway,
	sandbox.CodePortClosed:     http.StatusBadGateway,
	sandbox.CodeUnimplemented:  http.StatusNotImplemented,
	sandbox.CodeInternal:       http.StatusInternalServerError,
}

// Codes lists all codes that an API can answer with.
func Codes() []sandbox.Code { return slices.Sorted(maps.Keys(statuses)) }

// Status returns the HTTP status of a code. The audit log records it for every
// API.
func Status(c sandbox.Code) int { return statuses[c] }

// ToError gives each error a code.
func ToError(err error) *sandbox.Error {
	var own *sandbox.Error
	var guest *guestrpc.Error
	switch {
	case errors.As(err, &own):
		if _, known := statuses[own.Code]; !known {
			return sandbox.Errorf(sandbox.CodeInternal, "%s", own.Error())
		}
		return own
	case errors.As(err, &guest):
		return sandbox.Errorf(guestCode(guest.Code), "%s", guest.Message)
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Errorf(CodeTimeout, "it took too long: %v", err)
	case errors.Is(err, context.Canceled):
		return sandbox.Errorf(CodeUnavailable, "it was cancelled")
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%v", err)
}

// guestCode translates the code of an agent's error.
func guestCode(c guestrpc.Code) sandbox.Code {
	switch c {
	case guestrpc.CodeNotFound:
		return sandbox.CodeNotFound
	case guestrpc.CodeAlreadyExists:
		return sandbox.CodeExists
	case guestrpc.CodeInvalidArgument:
		return sandbox.CodeInvalid
	case guestrpc.CodePermissionDenied:
		return sandbox.CodeDenied
	case guestrpc.CodeFailedPrecondition:
		return sandbox.CodeConflict
	case guestrpc.CodeDeadlineExceeded:
		return CodeTimeout
	case guestrpc.CodeUnavailable, guestrpc.CodeAborted:
		return CodeUnavailable
	case guestrpc.CodeResourceExhausted:
		return CodeExhausted
	}
	return sandbox.CodeInternal
}
