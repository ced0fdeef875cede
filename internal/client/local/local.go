// Package local keeps the snapshots and sandboxes of one user on one machine, in
// folders and without a daemon.
//
//	<folder>/snapshots/<name>/            a snapshot (package snapshot)
//	<folder>/sandboxes/<name>/machine-N/  the machine's folder, while the sandbox runs
//	<folder>/sandboxes/<name>/image-N/    the snapshot of a hibernated sandbox
//	<folder>/sandboxes/<name>/sandbox.json  the record, written last: names the present one
//	<folder>/helpers/                     builds of gvisor-helper (package programs)
//	<folder>/scratch/                     disks' writable layers, without names
//
// A sandbox and the snapshot that it comes from do not need each other: either can
// be removed at any time.
package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/storage/image"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// EnvFolder names the environment variable that overrides the folder.
const EnvFolder = "AGENTRUN_STATE"

// Name is the name of a snapshot or sandbox, and of its folder.
type Name string

var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// ParseName checks a name. It must be a label of a host name, because a
// sandbox's name becomes its host name.
func ParseName(s string) (Name, error) {
	if !namePattern.MatchString(s) {
		return "", fmt.Errorf("name %q: use 1 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends", s)
	}
	return Name(s), nil
}

// ErrNotFound says that no snapshot or sandbox has this name.
var ErrNotFound = errors.New("no such snapshot or sandbox")

// Store is the folder, and the engines that run its sandboxes.
type Store struct {
	dir      string
	resident string // the folder of its memory layers
	policy   microvm.JailPolicy

	mu     sync.Mutex // protects opened
	opened map[pick.Kind]engine.Engine
}

// DefaultFolder returns the folder of a user's snapshots and sandboxes.
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

// OpenImages opens the user's images.
func OpenImages() (*image.Store, error) {
	dir, err := DefaultFolder()
	if err != nil {
		return nil, err
	}
	return image.OpenStore(filepath.Join(dir, "images"))
}

// Open opens a folder, and makes it if it is missing.
func Open(dir string, policy microvm.JailPolicy) (*Store, error) {
	for _, d := range []string{dir, filepath.Join(dir, "snapshots"), filepath.Join(dir, "sandboxes")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("open the folder for sandboxes: %w", err)
		}
	}
	return &Store{dir: dir, resident: layer.ResidentFolder(dir), policy: policy, opened: map[pick.Kind]engine.Engine{}}, nil
}

// engine opens an engine when it is first needed, because a machine may lack
// some engines.
func (s *Store) engine(kind pick.Kind) (engine.Engine, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.opened[kind]; e != nil {
		return e, nil
	}
	e, err := pick.Open(kind, pick.Config{Resident: s.resident, Scratch: filepath.Join(s.dir, "scratch"), Helpers: filepath.Join(s.dir, "helpers"), Jail: s.policy})
	if err != nil {
		return nil, err
	}
	s.opened[kind] = e
	return e, nil
}

// engineOf opens the engine of a snapshot.
func (s *Store) engineOf(snap *snapshot.Snapshot) (engine.Engine, error) {
	return s.engineFor(snap.Manifest().Engine)
}

// engineFor opens an engine by its name in snapshots.
func (s *Store) engineFor(name string) (engine.Engine, error) {
	kind, err := pick.Of(name)
	if err != nil {
		return nil, err
	}
	return s.engine(kind)
}

// Close closes the store; its sandboxes keep running.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, e := range s.opened {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}

// SnapshotFolder returns the folder of a snapshot.
func (s *Store) SnapshotFolder(n Name) string { return s.snapshotDir(n) }

func (s *Store) snapshotDir(n Name) string { return filepath.Join(s.dir, "snapshots", string(n)) }
func (s *Store) sandboxDir(n Name) string  { return filepath.Join(s.dir, "sandboxes", string(n)) }

// recordName is the file with a sandbox's record, in its folder.
const recordName = "sandbox.json"

// record is the content of sandbox.json.
type record struct {
	Created  time.Time     `json:"created"`
	Engine   pick.Kind     `json:"engine"`
	Snapshot string        `json:"snapshot,omitempty"` // the one that it comes from
	Limits   engine.Limits `json:"limits"`
	// Life counts the machines and snapshots that the sandbox has had.
	Life uint64 `json:"life"`
	// Paused says that its vCPUs are stopped. Hibernated says that it is a
	// snapshot without a machine.
	Paused     bool `json:"paused,omitempty"`
	Hibernated bool `json:"hibernated,omitempty"`
}

func (s *Store) machineDir(n Name, life uint64) string {
	return filepath.Join(s.sandboxDir(n), "machine-"+strconv.FormatUint(life, 10))
}

func (s *Store) asleepDir(n Name, life uint64) string {
	return filepath.Join(s.sandboxDir(n), "image-"+strconv.FormatUint(life, 10))
}

// Boot boots a sandbox on an engine. The sandbox has no name here and ends with this
// process. If the process is killed, it leaves no files, because the engine stores such a
// sandbox in files without names. The engine of the next process removes its cgroups and
// runtime folders before it starts a sandbox.
func (s *Store) Boot(ctx context.Context, kind pick.Kind, spec engine.Spec) (engine.Sandbox, error) {
	e, err := s.engine(kind)
	if err != nil {
		return nil, err
	}
	return e.Boot(ctx, spec)
}

// Template boots a sandbox on an engine, calls warm to prepare it, and captures
// it under a name.
func (s *Store) Template(ctx context.Context, name Name, kind pick.Kind, spec engine.Spec, warm func(engine.Sandbox) error) (err error) {
	if err := s.free(name); err != nil {
		return err
	}
	sb, err := s.Boot(ctx, kind, spec)
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
	// The session ends here once, so that no fork has to learn by itself that
	// it is gone.
	if err := sb.Agent().Close(); err != nil {
		return err
	}
	return s.capture(ctx, sb, s.snapshotDir(name))
}

// free returns an error if a snapshot or sandbox has the name already: a name
// stands for only one of them.
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

// Attach connects to a sandbox. A paused or hibernated one continues.
func (s *Store) Attach(ctx context.Context, name Name) (engine.Sandbox, error) {
	r, err := s.record(name)
	if err != nil {
		return nil, err
	}
	if r.Hibernated {
		return s.wake(ctx, name, r)
	}
	sb, err := s.adopt(ctx, name, r)
	if err != nil {
		return nil, err
	}
	if err := sb.Resume(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("sandbox %s: %w", name, err), sb.Detach())
	}
	if r.Paused {
		r.Paused = false
		if err := s.write(name, r); err != nil {
			return nil, errors.Join(err, sb.Detach())
		}
	}
	return sb, nil
}

// adopt connects to a sandbox that may be paused.
func (s *Store) adopt(ctx context.Context, name Name, r record) (engine.Sandbox, error) {
	e, err := s.engine(r.Engine)
	if err != nil {
		return nil, err
	}
	sb, err := e.Adopt(ctx, s.machineDir(name, r.Life))
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", name, err)
	}
	return sb, nil
}

// record reads the record of a sandbox.
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
	return r, nil
}

// FreeNames makes up unused names for forks: the source's name and a number.
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
