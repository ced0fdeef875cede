package agent

import (
	"container/heap"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	defaultListLimit = 1000
	maxListLimit     = 10000
	maxListDepth     = 64 // each level holds a descriptor while it is walked
)

// ListOptions configures a listing.
type ListOptions struct {
	Depth int    // 1 (also 0) lists the folder itself, 2 its subfolders too; at most 64
	Limit int    // entries per call; 0 is 1000, at most 10000
	Token string // Listing.Next of the previous call; "" begins
}

// Listing is one page.
type Listing struct {
	Entries []Info
	Next    string // token of the next page; "" on the last page
}

// List lists a folder, sorted by name, a folder before its own content. Symbolic
// links are not followed, except path itself. Subfolders that the user may not read
// are listed without content. The folder may change between two pages. Each entry
// that stays is listed exactly once.
//
// However many entries a folder has, only one page of names is held in memory.
func (f *Files) List(path string, opts ListOptions) (Listing, error) {
	path, err := checkPath("list", path)
	if err != nil {
		return Listing{}, err
	}
	l := lister{depth: max(opts.Depth, 1), limit: opts.Limit, names: nameCache{accounts: f.accounts}, root: path}
	if l.limit <= 0 {
		l.limit = defaultListLimit
	}
	l.limit = min(l.limit, maxListLimit)
	if l.depth > maxListDepth {
		return Listing{}, fail(ErrInvalid, "list", path, "depth is more than 64")
	}
	var after []string
	if opts.Token != "" {
		if len(opts.Token) >= maxPathLen {
			return Listing{}, fail(ErrInvalid, "list", path, "the token is not one of ours")
		}
		after = strings.Split(opts.Token, "/")
	}
	err = f.id.do(func() error {
		fd, err := open(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		return l.walk(fd, "", after, 1)
	})
	if err != nil {
		return Listing{}, failed("list", path, err)
	}
	out := Listing{Entries: l.out}
	if l.more {
		out.Next = l.last
	}
	return out, nil
}

type lister struct {
	root         string
	depth, limit int
	names        nameCache
	out          []Info
	last         string // path below root of the last entry in out
	more         bool   // at least one more entry follows out
}

// walk lists the folder open at fd, and closes it. It starts after the path after.
// rel is the folder's path below the root.
func (l *lister) walk(fd int, rel string, after []string, depth int) error {
	defer unix.Close(fd)
	from := ""
	if len(after) > 0 {
		from = after[0]
	}
	// It asks for one name more than fits, to learn whether another page follows. It
	// asks for yet another one because the first name may have been listed on an
	// earlier page, and is then only entered again.
	names, err := smallestNames(fd, from, l.limit-len(l.out)+2)
	if err != nil {
		return err
	}
	for _, name := range names {
		var st unix.Stat_t
		if unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			continue // gone again
		}
		var below []string
		if len(after) > 0 && name == after[0] {
			below = after[1:] // listed on an earlier page
		} else if !l.add(fd, rel, name, &st) {
			return nil
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR || depth == l.depth {
			continue
		}
		sub, err := open(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if err := l.walk(sub, rel+name+"/", below, depth+1); err != nil && err != syscall.ENOENT {
			return err
		}
		if l.more {
			return nil
		}
	}
	return nil
}

// add appends an entry, or records that more entries exist than fit.
func (l *lister) add(fd int, rel, name string, st *unix.Stat_t) bool {
	if len(l.out) == l.limit {
		l.more = true
		return false
	}
	info := makeInfo(joinPath(l.root, rel+name), st, &l.names)
	if info.Type == TypeSymlink {
		info.Target, _ = readlinkat(fd, name)
	}
	l.out = append(l.out, info)
	l.last = rel + name
	return true
}

// smallestNames returns the n smallest names not smaller than from, sorted.
func smallestNames(fd int, from string, n int) ([]string, error) {
	var h nameHeap
	err := eachName(fd, func(name []byte) bool {
		switch {
		case string(name) < from:
		case len(h) < n:
			heap.Push(&h, string(name))
		case string(name) < h[0]:
			h[0] = string(name)
			heap.Fix(&h, 0)
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	sorted := make([]string, len(h))
	for i := len(h) - 1; i >= 0; i-- {
		sorted[i] = heap.Pop(&h).(string)
	}
	return sorted, nil
}

// nameHeap has the largest name on top.
type nameHeap []string

func (h nameHeap) Len() int           { return len(h) }
func (h nameHeap) Less(i, j int) bool { return h[i] > h[j] }
func (h nameHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *nameHeap) Push(x any)        { *h = append(*h, x.(string)) }
func (h *nameHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}
