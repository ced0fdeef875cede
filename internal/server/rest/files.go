package rest

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// maxPath is the longest path.
const maxPath = 4096

func checkPath(field, path string) error {
	if path == "" || len(path) > maxPath {
		return sandbox.Invalid(field, "a path has 1 to %d bytes", maxPath)
	}
	return server.CheckText(field, path)
}

// withFile serves a route of one file.
func (a *api) withFile(w http.ResponseWriter, r *http.Request, namespace, name, path string, do func(*server.Session) error) {
	err := checkPath("path", path)
	var u *server.Session
	if err == nil {
		u, err = a.useNamed(r.Context(), namespace, name)
	}
	if err == nil {
		defer u.Close()
		err = recoded(do(u), fileCodes)
	}
	if err != nil {
		a.fail(w, r, err)
		return
	}
	if !began(w) {
		w.WriteHeader(http.StatusNoContent)
	}
}

// body is a client's upload, which may not stall.
type body struct {
	api  *api
	w    http.ResponseWriter
	from io.Reader
	err  error // of the client
}

func (a *api) upload(w http.ResponseWriter, r *http.Request) *body {
	return &body{api: a, w: w, from: r.Body}
}

func (b *body) Read(p []byte) (int, error) {
	_ = http.NewResponseController(b.w).SetReadDeadline(time.Now().Add(b.api.StallTimeout)) // see send
	n, err := b.from.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}

// done returns the client's error if the upload failed because of that, and
// else err.
func (b *body) done(err error) error {
	if b.err != nil {
		return bodyError(b.err, 0)
	}
	_ = http.NewResponseController(b.w).SetReadDeadline(time.Time{})
	return err
}

// ReadFile implements rest.ServerInterface.
func (a *api) ReadFile(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.ReadFileParams) {
	a.withFile(w, r, namespace, name, q.Path, func(u *server.Session) error {
		if q.Offset < 0 || q.Length < 0 {
			return sandbox.Invalid("offset, length", "they are not negative")
		}
		file, err := u.Agent().OpenRead(r.Context(), guestrpc.ReadRequest{FileScope: u.Scope(), Path: q.Path, Offset: q.Offset, Length: q.Length})
		if err != nil {
			return err
		}
		defer file.Close()
		info := file.Info()
		w.Header().Set("Last-Modified", info.ModTime.UTC().Format(http.TimeFormat))
		out := &flowing{api: a, w: w, kind: "application/octet-stream"}
		if _, err := io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{file}, make([]byte, guestrpc.MaxPayload)); err != nil {
			return err
		}
		out.begin() // of an empty file
		return nil
	})
}

// WriteFile implements rest.ServerInterface.
func (a *api) WriteFile(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.WriteFileParams) {
	a.withFile(w, r, namespace, name, q.Path, func(u *server.Session) error {
		perm, err := parseMode(q.Mode)
		if err != nil {
			return err
		}
		req := guestrpc.WriteRequest{FileScope: u.Scope(), Path: q.Path, Perm: perm, Parents: true, Exclusive: q.Exclusive}
		if q.Append {
			req.Mode = guestrpc.WriteAppend
		} else {
			req.Atomic = true
		}
		body := a.upload(w, r)
		reply, err := u.Agent().WriteFile(r.Context(), req, body)
		if err = body.done(err); err != nil {
			return err
		}
		a.write(w, r, http.StatusOK, rest.FileWritten{Written: reply.Written, Size: reply.Size})
		return nil
	})
}

// parseMode reads permission bits; an empty text is 0, which is the default.
func parseMode(s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	mode, err := strconv.ParseUint(s, 8, 32)
	if err != nil || mode == 0 || mode > 0o7777 {
		return 0, sandbox.Invalid("mode", "%q is not octal permission bits such as 644", server.Trimmed(s))
	}
	return uint32(mode), nil
}

// RemoveFile implements rest.ServerInterface.
func (a *api) RemoveFile(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.RemoveFileParams) {
	a.withFile(w, r, namespace, name, q.Path, func(u *server.Session) error {
		return u.Agent().Remove(r.Context(), guestrpc.RemoveRequest{FileScope: u.Scope(), Path: q.Path, Recursive: q.Recursive})
	})
}

// StatFile implements rest.ServerInterface.
func (a *api) StatFile(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.StatFileParams) {
	a.withFile(w, r, namespace, name, q.Path, func(u *server.Session) error {
		info, err := u.Agent().Stat(r.Context(), guestrpc.StatRequest{FileScope: u.Scope(), Path: q.Path, Follow: q.Follow == nil || *q.Follow})
		if err != nil {
			return err
		}
		a.write(w, r, http.StatusOK, showFile(info))
		return nil
	})
}

// maxDepth bounds how deep a list goes.
const maxDepth = 64

// ListFiles implements rest.ServerInterface.
func (a *api) ListFiles(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.ListFilesParams) {
	a.withFile(w, r, namespace, name, q.Path, func(u *server.Session) error {
		p, err := server.Page(q.Limit, q.After)
		if err != nil {
			return err
		}
		depth := 1
		if q.Depth != nil {
			depth = *q.Depth
		}
		if depth < 1 || depth > maxDepth {
			return sandbox.Invalid("depth", "%d is not between 1 and %d", depth, maxDepth)
		}
		found, err := u.Agent().List(r.Context(), guestrpc.ListRequest{
			FileScope: u.Scope(), Path: q.Path, Depth: uint32(depth), Token: p.After, Limit: uint32(p.Limit - 1),
		})
		if err != nil {
			return err
		}
		out := rest.FileList{Items: make([]rest.FileInfo, 0, len(found.Entries)), Next: found.Next}
		for _, info := range found.Entries {
			out.Items = append(out.Items, showFile(info))
		}
		a.write(w, r, http.StatusOK, out)
		return nil
	})
}

// MakeFolder implements rest.ServerInterface.
func (a *api) MakeFolder(w http.ResponseWriter, r *http.Request, namespace, name string) {
	var given rest.MakeFolder
	if _, err := a.readJSON(w, r, server.MaxBody, &given); err != nil {
		a.fail(w, r, err)
		return
	}
	a.withFile(w, r, namespace, name, given.Path, func(u *server.Session) error {
		perm, err := parseMode(given.Mode)
		if err != nil {
			return err
		}
		return u.Agent().Mkdir(r.Context(), guestrpc.MkdirRequest{
			FileScope: u.Scope(), Path: given.Path, Perm: perm, Parents: given.Parents == nil || *given.Parents,
		})
	})
}

// MoveFile implements rest.ServerInterface.
func (a *api) MoveFile(w http.ResponseWriter, r *http.Request, namespace, name string) {
	var given rest.MoveFile
	_, err := a.readJSON(w, r, server.MaxBody, &given)
	if err == nil {
		err = checkPath("to", given.To)
	}
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.withFile(w, r, namespace, name, given.From, func(u *server.Session) error {
		return u.Agent().Move(r.Context(), guestrpc.MoveRequest{FileScope: u.Scope(), From: given.From, To: given.To, Overwrite: given.Overwrite})
	})
}

var watchTypes = map[guestrpc.EventKind]rest.WatchEventType{
	guestrpc.EventCreate:   rest.WatchEventTypeCreate,
	guestrpc.EventWrite:    rest.WatchEventTypeWrite,
	guestrpc.EventRemove:   rest.WatchEventTypeRemove,
	guestrpc.EventRename:   rest.WatchEventTypeRename,
	guestrpc.EventChmod:    rest.WatchEventTypeChmod,
	guestrpc.EventOverflow: rest.WatchEventTypeOverflow,
	guestrpc.EventMovedTo:  rest.WatchEventTypeMovedTo,
	guestrpc.EventClose:    rest.WatchEventTypeClose,
	guestrpc.EventGone:     rest.WatchEventTypeGone,
}

// WatchFiles implements rest.ServerInterface.
func (a *api) WatchFiles(w http.ResponseWriter, r *http.Request, namespace, name string, q rest.WatchFilesParams) {
	a.withFile(w, r, namespace, name, q.Path, func(u *server.Session) error {
		form, err := accepted(r, formNDJSON, formSSE)
		if err != nil {
			return err
		}
		watch, err := u.Agent().Watch(r.Context(), guestrpc.WatchRequest{FileScope: u.Scope(), Path: q.Path, Recursive: q.Recursive})
		if err != nil {
			return err
		}
		defer watch.Close()
		e := a.newEvents(w, form)
		send := func(event rest.WatchEvent) error { return e.send(string(event.Type), event) }
		if err := send(rest.WatchEvent{Type: rest.WatchEventTypeWatching}); err != nil {
			return err
		}
		for {
			event, err := watch.Next()
			if err != nil {
				problem := wireError(err)
				return send(rest.WatchEvent{Type: rest.WatchEventTypeError, Error: &problem})
			}
			shown := rest.WatchEvent{Type: watchTypes[event.Kind], Path: event.Path, Folder: event.Dir, Cookie: int64(event.Cookie)}
			if err := send(shown); err != nil || event.Kind == guestrpc.EventGone {
				return err
			}
		}
	})
}

var fileTypes = map[uint32]rest.FileType{
	guestrpc.ModeRegular:     rest.FileTypeFile,
	guestrpc.ModeDir:         rest.FileTypeFolder,
	guestrpc.ModeSymlink:     rest.FileTypeSymlink,
	guestrpc.ModeFIFO:        rest.FileTypeFifo,
	guestrpc.ModeSocket:      rest.FileTypeSocket,
	guestrpc.ModeCharDevice:  rest.FileTypeCharDevice,
	guestrpc.ModeBlockDevice: rest.FileTypeBlockDevice,
}

func showFile(f guestrpc.FileInfo) rest.FileInfo {
	return rest.FileInfo{
		Path: f.Path, Type: fileTypes[f.Mode&guestrpc.ModeType], Mode: fmt.Sprintf("%04o", f.Mode&0o7777), Size: f.Size,
		Uid: int64(f.UID), Gid: int64(f.GID), Owner: f.Owner, Group: f.Group, Modified: f.ModTime.UTC(), Target: f.Target,
	}
}
