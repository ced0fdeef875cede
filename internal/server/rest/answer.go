package rest

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// retryAfter tells a client in how many seconds it may try again.
const retryAfter = "1"

// recoded gives an agent's error another code than its usual one: a missing
// file is not a missing sandbox.
func recoded(err error, codes map[guestrpc.Code]sandbox.Code) error {
	var guest *guestrpc.Error
	if errors.As(err, &guest) && codes[guest.Code] != "" {
		return sandbox.Errorf(codes[guest.Code], "%s", guest.Message)
	}
	return err
}

var fileCodes = map[guestrpc.Code]sandbox.Code{
	guestrpc.CodeNotFound:         server.CodeNoFile,
	guestrpc.CodeAlreadyExists:    server.CodeFileExists,
	guestrpc.CodePermissionDenied: server.CodeFileDenied,
}

var startCodes = map[guestrpc.Code]sandbox.Code{
	guestrpc.CodeNotFound:         server.CodeCannotRun,
	guestrpc.CodePermissionDenied: server.CodeCannotRun,
}

func wireError(err error) rest.Error {
	return restconv.FromError(server.ToError(err))
}

// fail answers with an error. If an answer is already under way, fail cuts it
// off instead.
func (a *api) fail(w http.ResponseWriter, r *http.Request, err error) {
	if began(w) {
		panic(http.ErrAbortHandler)
	}
	// net/http reads the rest of the body, and may not do so for ever.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(a.BodyTimeout))
	e := wireError(err)
	status := server.Status(sandbox.Code(e.Code))
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
		// The rest of the body is not read.
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

// send writes to the client, within the time that a client may stall.
func (a *api) send(w http.ResponseWriter, p []byte) (int, error) {
	c := http.NewResponseController(w)
	// Not every writer has deadlines; net/http's has. They are reset, because
	// they would outlast the request.
	_ = c.SetWriteDeadline(time.Now().Add(a.StallTimeout))
	defer func() { _ = c.SetWriteDeadline(time.Time{}) }()
	n, err := w.Write(p)
	if err == nil {
		err = c.Flush()
	}
	return n, err
}
