package guestrpc

import "time"

// FileScope is the user of a file call, and the folder that relative paths start in.
type FileScope struct {
	User    string // as in ExecRequest; empty: root
	Workdir string // relative paths start here; empty: the user's home
}

func (m *FileScope) visit(c *visitor) {
	c.str("user", &m.User, maxUser)
	c.str("cwd", &m.Workdir, maxPath)
}

// FileInfo describes a file.
type FileInfo struct {
	Path    string // absolute
	Mode    uint32 // st_mode: type and permission bits
	Size    int64
	UID     uint32
	GID     uint32
	Owner   string // name of UID, if it has one
	Group   string // name of GID, if it has one
	ModTime time.Time
	Target  string // of a symlink
}

// The type bits of FileInfo.Mode; see inode(7).
const (
	ModeType        = 0o170000
	ModeFIFO        = 0o010000
	ModeCharDevice  = 0o020000
	ModeDir         = 0o040000
	ModeBlockDevice = 0o060000
	ModeRegular     = 0o100000
	ModeSymlink     = 0o120000
	ModeSocket      = 0o140000
)

// IsDir reports whether the file is a folder.
func (m *FileInfo) IsDir() bool { return m.Mode&ModeType == ModeDir }

func (m *FileInfo) visit(c *visitor) {
	c.str("path", &m.Path, maxPath)
	number(c, "mode", &m.Mode, 1<<32-1)
	c.i64(&m.Size)
	number(c, "uid", &m.UID, 1<<32-1)
	number(c, "gid", &m.GID, 1<<32-1)
	c.str("owner", &m.Owner, maxUser)
	c.str("group", &m.Group, maxUser)
	c.time(&m.ModTime)
	c.str("target", &m.Target, maxPath)
}

// StatRequest asks for one file.
type StatRequest struct {
	FileScope
	Path   string
	Follow bool // follow a symlink at the end of the path
}

func (m *StatRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	c.bool(&m.Follow)
}

// ListRequest asks for the files in a folder, down to Depth levels, sorted by
// name, a folder before its contents.
type ListRequest struct {
	FileScope
	Path  string
	Depth uint32 // 1: the folder's own entries; 0 means 1
	Token string // ListReply.Next of the previous page; empty begins
	Limit uint32 // entries in a page; fewer come if they do not fit a frame
}

func (m *ListRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	number(c, "depth", &m.Depth, 1<<32-1)
	c.str("token", &m.Token, maxPath)
	number(c, "limit", &m.Limit, 1<<32-1)
}

// ListReply is one page.
type ListReply struct {
	Entries []FileInfo
	Next    string // token of the next page; empty after the last
}

func (m *ListReply) visit(c *visitor) {
	list(c, "entries", &m.Entries, maxListItems)
	c.str("next", &m.Next, maxPath)
}

// ReadRequest asks for a part of a file.
type ReadRequest struct {
	FileScope
	Path   string
	Offset int64
	Length int64 // 0: to the end
}

func (m *ReadRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	c.i64(&m.Offset)
	c.i64(&m.Length)
}

// WriteMode says how an existing file is written.
type WriteMode uint8

// The ways to write.
const (
	WriteTruncate WriteMode = 0 // replace the contents
	WriteAt       WriteMode = 1 // overwrite from Offset on, keep the rest
	WriteAppend   WriteMode = 2 // add to the end
)

// WriteRequest writes a file, which is created if it does not exist.
type WriteRequest struct {
	FileScope
	Path      string
	Perm      uint32 // permission bits of a new file; 0 means 0644
	Mode      WriteMode
	Offset    int64 // for WriteAt
	NoCreate  bool  // fail if the file does not exist
	Exclusive bool  // fail if the file exists
	Parents   bool  // create missing folders
	Sync      bool  // on disk before the reply; Atomic always is
	Atomic    bool  // with WriteTruncate: temp file, fsync, rename; if it fails, the file is unchanged
}

func (m *WriteRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	number(c, "perm", &m.Perm, 0o7777)
	number(c, "mode", &m.Mode, uint64(WriteAppend))
	c.i64(&m.Offset)
	c.bool(&m.NoCreate)
	c.bool(&m.Exclusive)
	c.bool(&m.Parents)
	c.bool(&m.Sync)
	c.bool(&m.Atomic)
}

// WriteReply ends a write.
type WriteReply struct {
	Written int64
	Size    int64 // of the file after the write
}

func (m *WriteReply) visit(c *visitor) {
	c.i64(&m.Written)
	c.i64(&m.Size)
}

// MkdirRequest creates a folder.
type MkdirRequest struct {
	FileScope
	Path    string
	Perm    uint32 // 0 means 0755
	Parents bool   // create missing parents; an existing folder is no error
}

func (m *MkdirRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	number(c, "perm", &m.Perm, 0o7777)
	c.bool(&m.Parents)
}

// MoveRequest renames a file or folder.
type MoveRequest struct {
	FileScope
	From, To  string
	Overwrite bool // replace To if it exists
}

func (m *MoveRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("from", &m.From, maxPath)
	c.str("to", &m.To, maxPath)
	c.bool(&m.Overwrite)
}

// RemoveRequest removes a file or folder.
type RemoveRequest struct {
	FileScope
	Path      string
	Recursive bool
}

func (m *RemoveRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	c.bool(&m.Recursive)
}

// SymlinkRequest creates a symlink at Path that points to Target.
type SymlinkRequest struct {
	FileScope
	Path, Target string
}

func (m *SymlinkRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	c.str("target", &m.Target, maxPath)
}

// ReadlinkRequest asks for the target of a symlink.
type ReadlinkRequest struct {
	FileScope
	Path string
}

func (m *ReadlinkRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
}

type readlinkReply struct {
	target string
}

func (m *readlinkReply) visit(c *visitor) { c.str("target", &m.target, maxPath) }

// ChmodRequest sets permission bits.
type ChmodRequest struct {
	FileScope
	Path string
	Perm uint32
}

func (m *ChmodRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	number(c, "perm", &m.Perm, 0o7777)
}

// ChownRequest sets the owner and the group, by name or number. An empty value leaves
// either unchanged.
type ChownRequest struct {
	FileScope
	Path         string
	Owner, Group string
	Follow       bool // follow a symlink at the end of the path
}

func (m *ChownRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	c.str("owner", &m.Owner, maxUser)
	c.str("group", &m.Group, maxUser)
	c.bool(&m.Follow)
}

// WatchRequest asks for changes of a file or folder.
type WatchRequest struct {
	FileScope
	Path      string
	Recursive bool
}

func (m *WatchRequest) visit(c *visitor) {
	m.FileScope.visit(c)
	c.str("path", &m.Path, maxPath)
	c.bool(&m.Recursive)
}

// EventKind is the kind of a change.
type EventKind uint8

// The kinds of events.
const (
	EventCreate   EventKind = 1
	EventWrite    EventKind = 2
	EventRemove   EventKind = 3
	EventRename   EventKind = 4 // moved away from Path; Cookie pairs it with an EventMovedTo
	EventChmod    EventKind = 5 // mode, owner, times or link count changed
	EventOverflow EventKind = 6 // events were lost: read everything again
	EventMovedTo  EventKind = 7 // moved to Path
	EventClose    EventKind = 8 // closed after it was open for writing
	EventGone     EventKind = 9 // the watched path itself is gone; the last event
)

// WatchEvent is one change.
type WatchEvent struct {
	Kind   EventKind
	Path   string // absolute
	Dir    bool
	Cookie uint32
}

func (m *WatchEvent) visit(c *visitor) {
	number(c, "kind", &m.Kind, uint64(EventGone))
	c.str("path", &m.Path, maxPath)
	c.bool(&m.Dir)
	number(c, "cookie", &m.Cookie, 1<<32-1)
}
