package server

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// Codes of what goes wrong in a sandbox.
const (
	codeCannotRun   sandbox.Code = "cannot_run"
	codeNoFile      sandbox.Code = "file_not_found"
	codeFileExists  sandbox.Code = "file_exists"
	codeFileDenied  sandbox.Code = "file_denied"
	codeExhausted   sandbox.Code = "resource_exhausted"
	codeUnavailable sandbox.Code = "unavailable"
)

// statuses are the HTTP statuses of all codes.
var statuses = map[sandbox.Code]int{
	sandbox.CodeInvalid:        http.StatusBadRequest,
	access.CodeUnauthenticated: http.StatusUnauthorized,
	access.CodeDenied:          http.StatusForbidden,
	codeFileDenied:             http.StatusForbidden,
	sandbox.CodeNotFound:       http.StatusNotFound,
	codeNoFile:                 http.StatusNotFound,
	codeMethod:                 http.StatusMethodNotAllowed,
	codeAccept:                 http.StatusNotAcceptable,
	sandbox.CodeExists:         http.StatusConflict,
	codeFileExists:             http.StatusConflict,
	sandbox.CodeConflict:       http.StatusConflict,
	sandbox.CodeEnded:          http.StatusGone,
	codeTooLarge:               http.StatusRequestEntityTooLarge,
	codeMedia:                  http.StatusUnsupportedMediaType,
	codeCannotRun:              http.StatusUnprocessableEntity,
	sandbox.CodeCapacity:       http.StatusServiceUnavailable,
	sandbox.CodeNotReady:       http.StatusServiceUnavailable,
	sandbox.CodeClosing:        http.StatusServiceUnavailable,
	codeAudit:                  http.StatusServiceUnavailable,
	codeExhausted:              http.StatusInsufficientStorage,
	codeTimeout:                http.StatusRequestTimeout,
	codeUnavailable:            http.StatusBadGateway,
	sandbox.CodePortClosed:     http.StatusBadGateway,
	sandbox.CodeUnimplemented:  http.StatusNotImplemented,
	sandbox.CodeInternal:       http.StatusInternalServerError,
}

// retryAfter is what a client is told that may try again, in seconds.
const retryAfter = "1"

// toError gives every error its code.
func toError(err error) *sandbox.Error {
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
		return sandbox.Errorf(codeTimeout, "it took too long: %v", err)
	case errors.Is(err, context.Canceled):
		return sandbox.Errorf(codeUnavailable, "it was cancelled")
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%v", err)
}

// guestCode is the code of what an agent says about its own things.
func guestCode(c guestrpc.Code) sandbox.Code {
	switch c {
	case guestrpc.CodeNotFound:
		return sandbox.CodeNotFound
	case guestrpc.CodeAlreadyExists:
		return sandbox.CodeExists
	case guestrpc.CodeInvalidArgument:
		return sandbox.CodeInvalid
	case guestrpc.CodePermissionDenied:
		return access.CodeDenied
	case guestrpc.CodeFailedPrecondition:
		return sandbox.CodeConflict
	case guestrpc.CodeDeadlineExceeded:
		return codeTimeout
	case guestrpc.CodeUnavailable, guestrpc.CodeAborted:
		return codeUnavailable
	case guestrpc.CodeResourceExhausted:
		return codeExhausted
	}
	return sandbox.CodeInternal
}

// recoded gives an agent's error another code than its usual one: that a file
// is missing is not that a sandbox is.
func recoded(err error, codes map[guestrpc.Code]sandbox.Code) error {
	var guest *guestrpc.Error
	if errors.As(err, &guest) && codes[guest.Code] != "" {
		return sandbox.Errorf(codes[guest.Code], "%s", guest.Message)
	}
	return err
}

var fileCodes = map[guestrpc.Code]sandbox.Code{
	guestrpc.CodeNotFound:         codeNoFile,
	guestrpc.CodeAlreadyExists:    codeFileExists,
	guestrpc.CodePermissionDenied: codeFileDenied,
}

var startCodes = map[guestrpc.Code]sandbox.Code{
	guestrpc.CodeNotFound:         codeCannotRun,
	guestrpc.CodePermissionDenied: codeCannotRun,
}

func wireError(err error) rest.Error {
	return restconv.FromError(toError(err))
}

// fail answers with an error, unless an answer is under way: that is cut off.
func (a *api) fail(w http.ResponseWriter, r *http.Request, err error) {
	if began(w) {
		panic(http.ErrAbortHandler)
	}
	// net/http reads what is left of the body, and may not do so for ever.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(a.BodyTimeout))
	e := wireError(err)
	status := statuses[sandbox.Code(e.Code)]
	if rec, ok := w.(*recorder); ok {
		rec.code = sandbox.Code(e.Code)
	}
	if status >= http.StatusInternalServerError && status != http.StatusServiceUnavailable {
		a.Log.Error("a request failed", "request", w.Header().Get("X-Request-Id"), "error", err)
	}
	switch status {
	case http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", "Bearer")
	case http.StatusServiceUnavailable:
		w.Header().Set("Retry-After", retryAfter)
	case http.StatusRequestTimeout, http.StatusRequestEntityTooLarge:
		// What is left of the body is not read.
		w.Header().Set("Connection", "close")
	}
	a.write(w, r, status, e)
}

// answer answers with an object, or with the error.
func (a *api) answer(w http.ResponseWriter, r *http.Request, status int, object any, err error) {
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.write(w, r, status, object)
}

// done answers without an object.
func (a *api) done(w http.ResponseWriter, r *http.Request, err error) {
	if err != nil {
		a.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (a *api) write(w http.ResponseWriter, r *http.Request, status int, object any) {
	body, err := json.Marshal(object)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	body = append(body, '\n')
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = a.send(w, body) // a client that is gone needs no answer
}

// send writes to the client, who may take only so long.
func (a *api) send(w http.ResponseWriter, p []byte) (int, error) {
	c := http.NewResponseController(w)
	// Not every writer has deadlines; net/http's has. They would outlast the
	// request.
	_ = c.SetWriteDeadline(time.Now().Add(a.StallTimeout))
	defer func() { _ = c.SetWriteDeadline(time.Time{}) }()
	n, err := w.Write(p)
	if err == nil {
		err = c.Flush()
	}
	return n, err
}
