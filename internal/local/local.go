// Package local keeps the snapshots and sandboxes of one user on one machine,
// in folders and without a daemon.
//
//	<folder>/snapshots/<name>/            a snapshot (package snapshot)
//	<folder>/sandboxes/<name>/from*/      what the sandbox was forked from, hard links,
//	                                      or what it was when it was hibernated
//	<folder>/sandboxes/<name>/control     the vmm's socket
//	<folder>/sandboxes/<name>/sandbox.json  written last: which process it is
//	<folder>/scratch/                     disks' writable layers, without names
//
// A sandbox does not need the snapshot it came from: it holds links to the
// files, so that either can be removed at any time.
package local

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/procid"
	"agentrun.dev/internal/snapshot"
)

// EnvFolder names the environment variable that overrides the folder.
const EnvFolder = "AGENTRUN_STATE"

// Name is the name of a snapshot or sandbox, and of its folder.
type Name string

var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// ParseName checks a name: it is a host name's label, since a sandbox's name
// becomes its host name.
func ParseName(s string) (Name, error) {
	if !namePattern.MatchString(s) {
		return "", fmt.Errorf("name %q: use 1 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends", s)
	}
	return Name(s), nil
}

// ErrNotFound says that there is neither a snapshot nor a sandbox of a name.
var ErrNotFound = errors.New("no such snapshot or sandbox")

// Store is the folder and the engines that run its sandboxes.
type Store struct {
	dir      string
	resident string // where its memory layers are
	policy   microvm.JailPolicy

	mu     sync.Mutex // protects opened
	opened map[pick.Kind]engine.Survivor
}

// DefaultFolder is where a user's snapshots and sandboxes are.
func DefaultFolder() (string, error) {
	if dir := os.Getenv(EnvFolder); dir != "" {
		return filepath.Abs(dir)
	}
	if os.Geteuid() == 0 {
		return "/var/lib/agentrun", nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "agentrun"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find the folder for sandboxes (set %s): %w", EnvFolder, err)
	}
	return filepath.Join(home, ".local", "state", "agentrun"), nil
}

// Open opens a folder, and makes it if it is missing.
func Open(dir string, policy microvm.JailPolicy) (*Store, error) {
	for _, d := range []string{dir, filepath.Join(dir, "snapshots"), filepath.Join(dir, "sandboxes")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("open the folder for sandboxes: %w", err)
		}
	}
	// One per folder, so that tidying one does not empty the other.
	sum := sha256.Sum256([]byte(dir))
	resident := "/dev/shm/agentrun-" + strconv.Itoa(os.Geteuid()) + "-" + hex.EncodeToString(sum[:4])
	return &Store{dir: dir, resident: resident, policy: policy, opened: map[pick.Kind]engine.Survivor{}}, nil
}

// engine opens an engine when it is first needed: a machine need not have all.
func (s *Store) engine(kind pick.Kind) (engine.Survivor, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.opened[kind]; e != nil {
		return e, nil
	}
	e, err := pick.Open(kind, pick.Config{Resident: s.resident, Scratch: filepath.Join(s.dir, "scratch"), Jail: s.policy})
	if err != nil {
		return nil, err
	}
	s.opened[kind] = e
	return e, nil
}

// engineOf opens the engine that a snapshot is of.
func (s *Store) engineOf(snap *snapshot.Snapshot) (engine.Survivor, error) {
	kind, err := pick.Of(snap.Manifest().Engine)
	if err != nil {
		return nil, err
	}
	return s.engine(kind)
}

// Close frees the store; sandboxes live on.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, e := range s.opened {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}

// SnapshotFolder is where a snapshot is.
func (s *Store) SnapshotFolder(n Name) string { return s.snapshotDir(n) }

func (s *Store) snapshotDir(n Name) string { return filepath.Join(s.dir, "snapshots", string(n)) }
func (s *Store) sandboxDir(n Name) string  { return filepath.Join(s.dir, "sandboxes", string(n)) }

// Files of a sandbox's folder.
const (
	fromName    = "from"
	controlName = "control"
	recordName  = "sandbox.json"
)

// record is what sandbox.json holds.
type record struct {
	Process  procid.ID `json:"process"`
	BootID   string    `json:"boot_id"` // process ids are good until the machine restarts
	Created  time.Time `json:"created"`
	Snapshot string    `json:"snapshot"`
	// Engine is that of the sandbox; empty is a microVM's.
	Engine pick.Kind `json:"engine,omitempty"`
	// From is the folder of the snapshot that its memory and disks are based
	// on: another after each hibernation.
	From   string        `json:"from"`
	Limits engine.Limits `json:"limits"`
	// Paused: its processors stand still. Hibernated: From is the sandbox.
	Paused     bool `json:"paused,omitempty"`
	Hibernated bool `json:"hibernated,omitempty"`
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read this machine's boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// engine is the kind of engine of a sandbox.
func (r *record) engine() pick.Kind {
	if r.Engine == "" {
		return pick.MicroVM
	}
	return r.Engine
}

// Template boots a sandbox on an engine, lets warm prepare it, and captures it
// under a name.
func (s *Store) Template(ctx context.Context, name Name, kind pick.Kind, spec engine.Spec, warm func(engine.Sandbox) error) (err error) {
	if err := s.free(name); err != nil {
		return err
	}
	e, err := s.engine(kind)
	if err != nil {
		return err
	}
	sb, err := e.Boot(ctx, spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sb.Close()) }()
	if err := warm(sb); err != nil {
		return err
	}
	if err := sb.Settle(ctx); err != nil {
		return err
	}
	// Forks need not be told that this session is gone, each for itself.
	if err := sb.Agent().Close(); err != nil {
		return err
	}
	return s.capture(ctx, sb, s.snapshotDir(name))
}

// free reports whether a name can be given to a snapshot or sandbox: each names
// one thing.
func (s *Store) free(name Name) error {
	for kind, dir := range map[string]string{"snapshot": s.snapshotDir(name), "sandbox": s.sandboxDir(name)} {
		if exists(dir) {
			return fmt.Errorf("%s %s is there already: choose another name, or remove it with agentrun rm %s", kind, name, name)
		}
	}
	return nil
}

func (s *Store) capture(ctx context.Context, sb engine.Sandbox, dir string) error {
	snap, err := sb.Snapshot(ctx, dir)
	if err != nil {
		return err
	}
	return snap.Close()
}

// Capture takes a snapshot of a running sandbox.
func (s *Store) Capture(ctx context.Context, from, name Name) (err error) {
	if err := s.free(name); err != nil {
		return err
	}
	sb, err := s.Attach(ctx, from)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sb.Detach()) }()
	return s.capture(ctx, sb, s.snapshotDir(name))
}

// Fork makes sandboxes that continue from a snapshot or from a running
// sandbox, which is captured once. Each has its own outcome.
func (s *Store) Fork(ctx context.Context, from Name, names []Name, limits engine.Limits) (outcomes []error, err error) {
	dir := s.snapshotDir(from)
	if !exists(dir) {
		if !exists(s.sandboxDir(from)) {
			return nil, fmt.Errorf("fork %s: %w", from, ErrNotFound)
		}
		temp, err := os.MkdirTemp(s.dir, "fork-")
		if err != nil {
			return nil, fmt.Errorf("fork %s: %w", from, err)
		}
		defer func() { _ = os.RemoveAll(temp) }() // the children have links
		dir = filepath.Join(temp, fromName)
		sb, err := s.Attach(ctx, from)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(s.capture(ctx, sb, dir), sb.Detach()); err != nil {
			return nil, fmt.Errorf("fork %s: %w", from, err)
		}
	}
	snap, err := snapshot.Open(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, snap.Close()) }()
	for _, n := range names {
		outcomes = append(outcomes, s.fork(ctx, snap, n, limits))
	}
	return outcomes, nil
}

func (s *Store) fork(ctx context.Context, snap *snapshot.Snapshot, name Name, limits engine.Limits) (err error) {
	if err := s.free(name); err != nil {
		return err
	}
	dir := s.sandboxDir(name)
	if err := os.Mkdir(dir, 0o700); err != nil { // another fork may have been faster
		return fmt.Errorf("fork: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	if err := clone(snap, filepath.Join(dir, fromName)); err != nil {
		return err
	}
	e, err := s.engineOf(snap)
	if err != nil {
		return err
	}
	sb, err := e.Fork(ctx, snap, engine.ForkOptions{
		Hostname: string(name), Socket: filepath.Join(dir, controlName), Limits: limits,
	})
	if err != nil {
		return err
	}
	if err := s.leave(e, sb, name, record{From: fromName, Limits: limits, Created: time.Now().UTC().Truncate(time.Second), Snapshot: snap.ID().String()}); err != nil {
		return errors.Join(err, sb.Close())
	}
	return nil
}

// clone makes another folder of a snapshot that shares its files.
func clone(snap *snapshot.Snapshot, dir string) error {
	b, err := snapshot.NewBuilder(dir)
	if err != nil {
		return err
	}
	m := snap.Manifest()
	seen := map[layer.Digest]bool{}
	for _, ref := range m.Layers() {
		if seen[ref.Digest] {
			continue
		}
		seen[ref.Digest] = true
		if err := b.LinkLayer(ref, snap); err != nil {
			return errors.Join(err, b.Abort())
		}
	}
	c, err := b.Commit(m, snap.State())
	if err != nil {
		return errors.Join(err, b.Abort())
	}
	return c.Close()
}

// Attach connects to a sandbox. One that is paused or hibernated goes on.
func (s *Store) Attach(ctx context.Context, name Name) (engine.Attached, error) {
	if err := s.Resume(ctx, name); err != nil {
		return nil, err
	}
	r, err := s.record(name)
	if err != nil {
		return nil, err
	}
	snap, err := snapshot.Open(filepath.Join(s.sandboxDir(name), r.From))
	if err != nil {
		return nil, err
	}
	opts := engine.ForkOptions{Hostname: string(name), Socket: filepath.Join(s.sandboxDir(name), controlName)}
	e, err := s.engine(r.engine())
	if err != nil {
		return nil, errors.Join(err, snap.Close())
	}
	sb, err := e.Attach(ctx, snap, opts, r.Process)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("sandbox %s: %w", name, err), snap.Close())
	}
	return sb, nil
}

// record reads which process a sandbox is.
func (s *Store) record(name Name) (r record, err error) {
	b, err := os.ReadFile(filepath.Join(s.sandboxDir(name), recordName))
	if errors.Is(err, fs.ErrNotExist) {
		if exists(s.sandboxDir(name)) {
			return r, fmt.Errorf("sandbox %s is being made, or was left half made: agentrun rm %s removes it", name, name)
		}
		return r, fmt.Errorf("sandbox %s: %w", name, ErrNotFound)
	}
	if err != nil {
		return r, fmt.Errorf("sandbox %s: %w", name, err)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("sandbox %s: %s is damaged: %w", name, recordName, err)
	}
	boot, err := bootID()
	if err != nil {
		return r, err
	}
	if r.From == "" || r.From != filepath.Base(r.From) || !strings.HasPrefix(r.From, fromName) {
		return r, fmt.Errorf("sandbox %s: %s is damaged: it is from %q", name, recordName, r.From)
	}
	if r.Hibernated { // which a restart does not end
		return r, nil
	}
	if r.BootID != boot {
		return r, fmt.Errorf("sandbox %s: %w when this machine restarted", name, engine.ErrEnded)
	}
	return r, nil
}

// FreeNames makes up names for forks: the source's and a number.
func (s *Store) FreeNames(from Name, count int) ([]Name, error) {
	var names []Name
	for i := 1; len(names) < count; i++ {
		n, err := ParseName(string(from) + "-" + strconv.Itoa(i))
		if err != nil {
			return nil, fmt.Errorf("make up a name: %w", err)
		}
		if s.free(n) == nil {
			names = append(names, n)
		}
	}
	return names, nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
