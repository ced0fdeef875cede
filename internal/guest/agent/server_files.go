package agent

import (
	"context"
	"io"
	"strings"

	"agentrun.dev/internal/guest/guestrpc"
)

const (
	maxPage    = 2000
	maxName    = 256 // of an owner or group, as in the protocol
	maxRPCPath = 4096
)

// at returns the files of the call's user, and the absolute path that the call means.
func (s *Server) at(scope guestrpc.FileScope, path string) (*Files, string, error) {
	f, err := NewFiles(s.Accounts, scope.User)
	if err != nil {
		return nil, "", rpcError(err)
	}
	abs, err := absolute(f, scope.Workdir, path)
	return f, abs, rpcError(err)
}

// absolute puts a relative path after workdir, or after the user's home. It does not
// clean the path: only the kernel resolves ".." after a symlink correctly.
func absolute(f *Files, workdir, path string) (string, error) {
	if path == "" {
		return "", fail(ErrInvalid, "find", "", "the path is empty")
	}
	if path[0] == '/' {
		return path, nil
	}
	switch {
	case workdir == "" && f.id.Home != "":
		workdir = f.id.Home
	case workdir == "":
		workdir = "/"
	case workdir[0] != '/':
		return "", fail(ErrInvalid, "find", path, "the folder it is relative to must be absolute")
	}
	// "./" adds nothing, and would otherwise be in every returned path.
	for strings.HasPrefix(path, "./") {
		path = strings.TrimLeft(path[2:], "/")
	}
	if path == "" || path == "." {
		return workdir, nil
	}
	return joinPath(workdir, path), nil
}

// Stat implements guestrpc.Handler.
func (s *Server) Stat(_ context.Context, req *guestrpc.StatRequest) (guestrpc.FileInfo, error) {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return guestrpc.FileInfo{}, err
	}
	stat := f.Lstat
	if req.Follow {
		stat = f.Stat
	}
	info, err := stat(path)
	return fileInfo(&info), rpcError(err)
}

var typeBits = [...]uint32{
	TypeFile:        guestrpc.ModeRegular,
	TypeDirectory:   guestrpc.ModeDir,
	TypeSymlink:     guestrpc.ModeSymlink,
	TypeFIFO:        guestrpc.ModeFIFO,
	TypeSocket:      guestrpc.ModeSocket,
	TypeCharDevice:  guestrpc.ModeCharDevice,
	TypeBlockDevice: guestrpc.ModeBlockDevice,
}

func fileInfo(info *Info) guestrpc.FileInfo {
	out := guestrpc.FileInfo{
		Path:    info.Path,
		Mode:    typeBits[info.Type] | info.Mode,
		Size:    info.Size,
		UID:     info.UID,
		GID:     info.GID,
		Owner:   info.Owner,
		Group:   info.Group,
		ModTime: info.ModTime,
		Target:  info.Target,
	}
	// The names come from files that the sandbox may have changed.
	if len(out.Owner) > maxName {
		out.Owner = ""
	}
	if len(out.Group) > maxName {
		out.Group = ""
	}
	return out
}

// List implements guestrpc.Handler. A page has as many entries as fit a frame.
func (s *Server) List(_ context.Context, req *guestrpc.ListRequest) (guestrpc.ListReply, error) {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return guestrpc.ListReply{}, err
	}
	opts := ListOptions{Depth: int(min(req.Depth, maxListDepth+1)), Limit: maxPage, Token: req.Token}
	if req.Limit > 0 {
		opts.Limit = int(min(req.Limit, maxPage))
	}
	for {
		page, err := f.List(path, opts)
		if err != nil {
			return guestrpc.ListReply{}, rpcError(err)
		}
		reply := guestrpc.ListReply{Next: page.Next, Entries: make([]guestrpc.FileInfo, 0, len(page.Entries))}
		for i := range page.Entries {
			// A deeper path may exist, but no call could name it.
			if len(page.Entries[i].Path) < maxRPCPath {
				reply.Entries = append(reply.Entries, fileInfo(&page.Entries[i]))
			}
		}
		n := guestrpc.FitFiles(reply.Entries)
		if n == len(reply.Entries) {
			return reply, nil
		}
		if n == 0 {
			return guestrpc.ListReply{}, rpcError(fail(ErrTooLarge, "list", path, "an entry does not fit a frame"))
		}
		// List again with the smaller limit, since only List knows the token after
		// the last entry that fits.
		opts.Limit = n
	}
}

// Read implements guestrpc.Handler.
func (s *Server) Read(_ context.Context, req *guestrpc.ReadRequest, st *guestrpc.ReadStream) error {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return err
	}
	r, err := f.OpenRead(path, req.Offset, req.Length)
	if err != nil {
		return rpcError(err)
	}
	defer r.Close()
	info := r.Info()
	if err := st.Opened(fileInfo(&info)); err != nil {
		return err
	}
	// One byte more than the file, so that a small file is read in one call.
	buf := make([]byte, min(max(info.Size+1, firstCopy), maxCopy))
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, err := st.Write(buf[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return rpcError(err)
		}
		buf = grow(buf, n)
	}
}

// Write implements guestrpc.Handler.
func (s *Server) Write(_ context.Context, req *guestrpc.WriteRequest, in io.Reader) (guestrpc.WriteReply, error) {
	var reply guestrpc.WriteReply
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return reply, err
	}
	mode := WriteTruncate
	switch req.Mode {
	case guestrpc.WriteAt:
		mode = WriteAt
	case guestrpc.WriteAppend:
		mode = WriteAppend
	}
	w, err := f.OpenWrite(path, WriteOptions{
		Mode: mode, Offset: req.Offset, Perm: req.Perm, NoCreate: req.NoCreate, Exclusive: req.Exclusive,
		Parents: req.Parents, Sync: req.Sync, Atomic: req.Atomic,
	})
	if err != nil {
		return reply, rpcError(err)
	}
	defer w.Abort() // does nothing after Commit
	if reply.Written, err = copyGrowing(w, in); err != nil {
		return reply, rpcError(err)
	}
	if err := w.Commit(); err != nil {
		return reply, rpcError(err)
	}
	reply.Size = reply.Written
	if mode != WriteTruncate {
		info, err := f.Stat(path)
		if err != nil {
			return reply, rpcError(err)
		}
		reply.Size = info.Size
	}
	return reply, nil
}

// copyGrowing copies with a buffer that grows with the amount of data.
func copyGrowing(w io.Writer, r io.Reader) (int64, error) {
	buf := make([]byte, firstCopy)
	total := int64(0)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return total, err
			}
			total += int64(n)
		}
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			return total, err
		}
		buf = grow(buf, n)
	}
}

// Mkdir implements guestrpc.Handler.
func (s *Server) Mkdir(_ context.Context, req *guestrpc.MkdirRequest) error {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return err
	}
	return rpcError(f.Mkdir(path, req.Perm, req.Parents))
}

// Move implements guestrpc.Handler.
func (s *Server) Move(_ context.Context, req *guestrpc.MoveRequest) error {
	f, from, err := s.at(req.FileScope, req.From)
	if err != nil {
		return err
	}
	to, err := absolute(f, req.Workdir, req.To)
	if err != nil {
		return rpcError(err)
	}
	return rpcError(f.Move(from, to, req.Overwrite))
}

// Remove implements guestrpc.Handler.
func (s *Server) Remove(_ context.Context, req *guestrpc.RemoveRequest) error {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return err
	}
	return rpcError(f.Remove(path, req.Recursive))
}

// Symlink implements guestrpc.Handler.
func (s *Server) Symlink(_ context.Context, req *guestrpc.SymlinkRequest) error {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return err
	}
	return rpcError(f.Symlink(req.Target, path))
}

// Readlink implements guestrpc.Handler.
func (s *Server) Readlink(_ context.Context, req *guestrpc.ReadlinkRequest) (string, error) {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return "", err
	}
	target, err := f.Readlink(path)
	return target, rpcError(err)
}

// Chmod implements guestrpc.Handler.
func (s *Server) Chmod(_ context.Context, req *guestrpc.ChmodRequest) error {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return err
	}
	return rpcError(f.Chmod(path, req.Perm))
}

// Chown implements guestrpc.Handler.
func (s *Server) Chown(_ context.Context, req *guestrpc.ChownRequest) error {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return err
	}
	return rpcError(f.Chown(path, req.Owner, req.Group, req.Follow))
}

var eventKinds = [...]guestrpc.EventKind{
	EventCreate:   guestrpc.EventCreate,
	EventWrite:    guestrpc.EventWrite,
	EventClose:    guestrpc.EventClose,
	EventAttrib:   guestrpc.EventChmod,
	EventRemove:   guestrpc.EventRemove,
	EventMoveFrom: guestrpc.EventRename,
	EventMoveTo:   guestrpc.EventMovedTo,
	EventOverflow: guestrpc.EventOverflow,
	EventGone:     guestrpc.EventGone,
}

// Watch implements guestrpc.Handler.
func (s *Server) Watch(ctx context.Context, req *guestrpc.WatchRequest, st *guestrpc.WatchStream) error {
	f, path, err := s.at(req.FileScope, req.Path)
	if err != nil {
		return err
	}
	w, err := f.Watch(path, req.Recursive)
	if err != nil {
		return rpcError(err)
	}
	defer w.Close()
	if err := st.Watching(); err != nil {
		return err
	}
	// Next waits for the kernel and knows nothing of ctx.
	go func() {
		<-ctx.Done()
		w.Close()
	}()
	for {
		events, err := w.Next()
		if err != nil {
			return rpcError(err)
		}
		last := events[len(events)-1].Kind == EventGone
		out := make([]guestrpc.WatchEvent, 0, len(events))
		for _, e := range events {
			if len(e.Path) < maxRPCPath {
				out = append(out, guestrpc.WatchEvent{Kind: eventKinds[e.Kind], Path: e.Path, Dir: e.Dir, Cookie: e.Cookie})
			}
		}
		if err := st.Send(out...); err != nil {
			return err
		}
		if last {
			return nil
		}
	}
}
