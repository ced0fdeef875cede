// Package node owns the objects of a node and their life: templates, pools,
// sandboxes, forks and checkpoints. Its Manager is the only writer of the
// journal. docs/design/forkd.md describes all of it.
package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/node/buildlog"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/peer"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/snapshot"
)

// Config configures a Manager.
type Config struct {
	// Dir is the state folder.
	Dir     string
	Engine  engine.Engine
	Builder Builder
	// Images has the images that the builder finds; it may be nil.
	Images ImageStore
	// Capacity is how much memory sandboxes may reserve together.
	Capacity uint64
	// Starts is how many machines are started at once; 0 decides by the host's
	// processors.
	Starts int
	// Builds is how many templates are built at once; 0 decides by the host's
	// processors.
	Builds int
	// Captures is how many sandboxes are hibernated, checkpointed or forked at once; 0
	// decides by the host's processors.
	Captures int
	// StorageReserve is how many bytes of the state folder's disk are kept free of data
	// that tenants store; 0 keeps no reserve.
	StorageReserve uint64
	// Key seals secrets, and images of sandboxes that hold some; with nil the
	// daemon accepts no secrets.
	Key *seal.Key
	// NodeID is the node's name; if it is empty, one is made up once, and kept.
	NodeID string
	// Codes become parts of the ids of sandboxes that the node makes; zero adds
	// no codes.
	Codes sandbox.Codes
	// Boot identifies the host's boot.
	Boot string
	// Commits is the cost of the journal's commits, for measurements.
	Commits journal.Cost
	Log     *slog.Logger
	// Observer is told of events; it may be nil.
	Observer sandbox.Observer
	// Network connects the interfaces of sandboxes; with nil they stay
	// unconnected.
	Network Network
	// Peers gets snapshots from other nodes; with nil the daemon fetches no snapshots.
	Peers Peers
	// Serves bounds the reads of other nodes.
	Serves peer.Limits
}

// Manager owns the objects of a node. Its methods are safe for concurrent use.
type Manager struct {
	cfg      Config
	observer sandbox.Observer
	db       *journal.DB
	capacity *admission
	// turns are for machines that start, buildTurns for builds, captureTurns for sandboxes
	// that hibernate, are checkpointed or forked, adoptTurns for adoptions, fetchTurns for
	// fetches of snapshots, lookupTurns for questions to registries.
	turns, buildTurns, fetchTurns, captureTurns, adoptTurns, lookupTurns *turns

	secrets *secretStore
	logins  *loginStore
	// authorities are the CAs of namespaces, injections the machines whose requests get
	// values of secrets.
	authorities *authorityStore
	injections  injections
	ctx         context.Context // ends when the manager closes
	cancel      context.CancelFunc
	work        sync.WaitGroup // all goroutines
	dirty       chan struct{}  // holds at most one notice that something was removed
	// id is the node's name, processor the processor that sandboxes see.
	id        string
	processor engine.Processor
	cordon    *cordon
	changes   *changes
	tally     *tally
	watchers  watchers
	// watchesBegin holds a token for each watch that is reading all objects.
	watchesBegin chan struct{}
	// statusChanged holds at most one notice that the status of a pool or of the node
	// may have changed.
	statusChanged chan struct{}
	history       history
	forked        chan struct{} // holds at most one notice that there are many new forks
	newForks      atomic.Int64
	// adopted is closed once the adoption of each machine of an earlier daemon
	// was tried.
	adopted chan struct{}

	// room watches the free space of the state folder's disk.
	room *room

	quotaTurn  sync.Mutex // held while a quota is changed
	cordonTurn sync.Mutex // held while the cordon is changed
	imageTurn  sync.Mutex // held while an image of a template is pulled or dropped
	poolTurns  keyTurns   // of calls that apply or delete a pool
	ownerTurns textTurns  // of claims for an owner
	partsTurns textTurns  // of calls that use the fetched parts of a snapshot
	serves     *peer.Server

	templateTurns keyTurns // of calls that apply or delete a template

	mu        sync.Mutex // protects all following fields
	closed    bool
	roster    roster
	pools     map[sandbox.Key]*pool
	builds    map[buildKey]*build // those that are under way
	places    buildPlaces
	requests  map[string]*request        // those with an idempotency key that are under way
	restoring map[sandbox.Key]int        // how many sandboxes are being made of each checkpoint; -1 while it is deleted
	parked    map[sandbox.ID]sandbox.Key // machines that wait in pools
}

// The journal's collections. Sandboxes are kept by id, the rest by key.
var (
	templates = journal.Collection[sandbox.Template]("templates")
	builds    = journal.Collection[sandbox.Build]("builds")
	pools     = journal.Collection[sandbox.Pool]("pools")
	sandboxes = journal.Collection[sandbox.Sandbox]("sandboxes")
	forks     = journal.Collection[sandbox.Fork]("forks")
)

// Open opens the state folder, takes over the sandboxes that still run, and
// goes on with interrupted work.
func Open(ctx context.Context, cfg Config) (_ *Manager, err error) {
	for _, dir := range []string{machinesDir, imagesDir, snapshotsDir, checkpointsDir, logsDir, fetchingDir} {
		if err := os.MkdirAll(filepath.Join(cfg.Dir, dir), 0o700); err != nil {
			return nil, fmt.Errorf("open the state folder: %w", err)
		}
	}
	db, err := journal.OpenAt(filepath.Join(cfg.Dir, "journal"), cfg.Commits)
	if err != nil {
		return nil, err
	}
	secrets, err := openSecrets(SecretsFolder(cfg.Dir), cfg.Key)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	authorities, err := openAuthorities(filepath.Join(cfg.Dir, authoritiesDir), cfg.Key)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	logins, err := openLogins(filepath.Join(cfg.Dir, loginsDir), cfg.Key)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	if cfg.Observer == nil {
		cfg.Observer = sandbox.Observers()
	}
	if cfg.Starts < 1 {
		// With two starts on one processor, one can work while the other waits. Pools
		// leave one of two turns to claims.
		cfg.Starts = max(2, runtime.NumCPU())
	}
	if cfg.Builds < 1 {
		cfg.Builds = max(2, runtime.NumCPU()) // a namespace has at most half of them
	}
	if cfg.Captures < 1 {
		cfg.Captures = max(4, runtime.NumCPU()) // a capture mostly waits for the disk
	}
	db.Observe(cfg.Observer.Journaled)
	db.ObserveCompactions(func(c journal.Compaction) {
		if c.Err != nil {
			cfg.Log.Error("compact the journal", "error", c.Err)
			return
		}
		cfg.Log.Info("compacted the journal", "before", c.Before, "after", c.After, "took", c.Took, "writersWaited", c.Held)
	})
	var version uint64
	if err := db.View(func(tx *journal.Tx) error { version = tx.Version(); return nil }); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	kept, counted := newChanges(version), newTally()
	db.ObserveCommits(func(c journal.Commit) { kept.note(c); counted.note(c) })
	m := &Manager{
		cordon:  &cordon{changed: make(chan struct{})},
		changes: kept, tally: counted, statusChanged: make(chan struct{}, 1), watchesBegin: make(chan struct{}, watchesBegin),
		cfg: cfg, observer: cfg.Observer, db: db, secrets: secrets, authorities: authorities, logins: logins,
		turns: newTurns(cfg.Starts), buildTurns: newLongTurns(cfg.Builds, "build"), captureTurns: newLongTurns(cfg.Captures, "capture a sandbox"),
		fetchTurns: newLongTurns(fetches, "fetch a snapshot"), serves: peer.NewServer(cfg.Serves),
		adoptTurns: newLongTurns(adoptions, "take over a machine"), lookupTurns: newLongTurns(lookups, "ask a registry"),
		dirty: make(chan struct{}, 1), adopted: make(chan struct{}), forked: make(chan struct{}, 1),
		roster: newRoster(), pools: map[sandbox.Key]*pool{}, builds: map[buildKey]*build{}, places: newBuildPlaces(),
		requests: map[string]*request{}, restoring: map[sandbox.Key]int{}, parked: map[sandbox.ID]sandbox.Key{},
	}
	m.capacity = newAdmission(cfg.Capacity, m.dropHeld)
	m.room = &room{dir: cfg.Dir, reserve: cfg.StorageReserve}
	m.capacity.changed = m.noticeStatus
	m.ctx, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if m.processor, err = engine.ProcessorOf(cfg.Engine); err != nil {
		cfg.Log.Warn("the node does not tell its processor", "error", err)
	}
	if err := m.recover(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("recover the state: %w", err), m.Close())
	}
	m.work.Go(m.tidyUp)
	m.noticeStatus()
	m.work.Go(m.recordStatuses)
	m.work.Go(m.drain)
	m.work.Go(m.forgetForks)
	m.work.Go(m.renewCertificates)
	return m, nil
}

// Close lets go of all sandboxes. They keep running, and the next Open finds
// them.
func (m *Manager) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	running := m.pools
	m.pools = map[sandbox.Key]*pool{}
	members := slices.Collect(maps.Values(m.roster.byID)) // a claim that is refused from now on leaves the roster
	m.mu.Unlock()
	m.cancel()
	for _, t := range []*turns{m.turns, m.buildTurns, m.fetchTurns, m.captureTurns, m.adoptTurns, m.lookupTurns} {
		t.close()
	}
	var errs []error
	for _, p := range running {
		errs = append(errs, p.close())
	}
	for _, s := range members {
		errs = append(errs, s.detach())
	}
	m.work.Wait()
	return errors.Join(append(errs, m.db.Close())...)
}

// begin is called before each change. It fails if the manager is closed.
func (m *Manager) begin() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosing()
	}
	return nil
}

func errClosing() error {
	return sandbox.Errorf(sandbox.CodeClosing, "the daemon is shutting down").Try("Try again when it is back")
}

// The folders inside the state folder.
const (
	machinesDir    = "machines"
	imagesDir      = "images"
	snapshotsDir   = "snapshots"
	checkpointsDir = "checkpoints"
	logsDir        = "logs"
	secretsDir     = "secrets"
	authoritiesDir = "authorities"
	loginsDir      = "registries"
	fetchingDir    = "fetching"
)

func (m *Manager) machineDir(id sandbox.ID) string {
	return filepath.Join(m.cfg.Dir, machinesDir, string(id))
}
func (m *Manager) asleepDir(id sandbox.ID) string {
	return filepath.Join(m.cfg.Dir, imagesDir, string(id))
}
func (m *Manager) snapshotDir(id sandbox.ID) string {
	return filepath.Join(m.cfg.Dir, snapshotsDir, string(id))
}

func (m *Manager) checkpointDir(id sandbox.ID) string {
	return filepath.Join(m.cfg.Dir, checkpointsDir, string(id))
}

func (m *Manager) logFile(id sandbox.ID) string {
	return filepath.Join(m.cfg.Dir, logsDir, string(id)+".log")
}

// recover makes journal, machines and files consistent, in the order of
// docs/design/forkd.md.
func (m *Manager) recover(ctx context.Context) error {
	if err := m.checkEngine(); err != nil {
		return err
	}
	if err := errors.Join(m.recoverQuotas(), m.recoverCordon(), m.identify()); err != nil {
		return err
	}
	var found []sandbox.Sandbox
	now := time.Now()
	err := m.db.Update(func(tx *journal.Tx) error {
		if err := sandboxes.Each(tx, "", func(_ string, s sandbox.Sandbox) error {
			found = append(found, s)
			return nil
		}); err != nil {
			return err
		}
		if err := m.tally.read(tx, found); err != nil {
			return err
		}
		unanswered, err := settleForks(tx)
		if err != nil {
			return err
		}
		sizes := m.measurer()
		for i := range found {
			unanswered.end(&found[i], now)
			if err := m.settle(tx, &found[i], sizes, now); err != nil {
				return err
			}
		}
		return errors.Join(settleCheckpoints(tx), sizes.checkpoints(tx), sizes.builds(tx))
	})
	if err = errors.Join(err, m.recoverHistory()); err != nil {
		return err
	}
	for _, s := range found {
		if s.State == sandbox.Ended && s.Ended.Equal(now) {
			m.observer.Ended(s.PoolKey(), s.Reason)
		}
		if s.State == sandbox.Starting || s.State == sandbox.Ended {
			continue
		}
		m.register(s)
	}
	// The memory that a killed daemon has left behind is not charged to any
	// namespace.
	if err := errors.Join(m.sweep(ctx), m.recoverStorage(), m.keep(machinesDir), m.recoverSnapshots()); err != nil {
		return err
	}
	if err := errors.Join(m.recoverPools(), m.recoverBuilds()); err != nil {
		return err
	}
	m.adoptAll()
	m.work.Go(m.keepPrograms) // an earlier daemon may have ended before it did so
	// So that the first caller need not wait for all of it; callers get its errors.
	m.work.Go(func() { _, _ = m.CheckpointBytes() })
	return nil
}

// startInTurn waits for a turn and then calls startMachine, for a machine that
// a user of a namespace waits for.
func (m *Manager) startInTurn(ctx context.Context, n sandbox.Namespace, limits sandbox.Limits, start func(engine.ForkOptions) (engine.Sandbox, error)) (engine.Sandbox, sandbox.ID, error) {
	release, err := m.turns.take(ctx, n)
	if err != nil {
		return nil, "", err
	}
	defer release()
	return m.startMachine(limits, start)
}

// startMachine makes a machine in a new folder. The caller has reserved its
// memory, and has a turn.
func (m *Manager) startMachine(limits sandbox.Limits, start func(engine.ForkOptions) (engine.Sandbox, error)) (engine.Sandbox, sandbox.ID, error) {
	id := sandbox.NewID()
	dir := m.machineDir(id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, "", fmt.Errorf("make a machine: %w", err)
	}
	sb, err := start(engine.ForkOptions{Folder: dir, Limits: engineLimits(limits)})
	if err != nil {
		return nil, "", errors.Join(err, m.cfg.Engine.Remove(m.ctx, dir))
	}
	return sb, id, nil
}

// settle decides the outcome of an intent that a daemon has left.
func (m *Manager) settle(tx *journal.Tx, s *sandbox.Sandbox, sizes measurer, now time.Time) error {
	state, kept := s.State, s.Kept
	if err := sizes.image(s); err != nil {
		return err
	}
	switch s.State {
	case sandbox.Starting:
		return sandboxes.Delete(tx, string(s.ID))
	case sandbox.Hibernating:
		s.State, s.Asleep = sandbox.Running, ""
	case sandbox.Resuming:
		s.State, s.Machine = sandbox.Hibernated, ""
	}
	if (s.State == sandbox.Running || s.State == sandbox.Paused) && s.Boot != m.cfg.Boot {
		s.End(sandbox.ReasonHostRestart, "the host was restarted while it ran", now)
	}
	if s.State == sandbox.Ended {
		return writeEnded(tx, s)
	}
	if s.State == state && s.Kept == kept && s.Unresponsive == "" {
		return nil // watchers see no change
	}
	s.Unresponsive = "" // this daemon finds out by itself
	return sandboxes.Write(tx, string(s.ID), s)
}

// sweep removes files that no object names.
func (m *Manager) sweep(ctx context.Context) error {
	named := map[string]bool{}
	err := m.db.View(func(tx *journal.Tx) error {
		return errors.Join(
			sandboxes.Each(tx, "", func(_ string, s sandbox.Sandbox) error {
				if s.State != sandbox.Ended {
					named[m.machineDir(s.Machine)], named[m.asleepDir(s.Asleep)] = true, true
				}
				return nil
			}),
			builds.Each(tx, "", func(_ string, b sandbox.Build) error {
				named[m.snapshotDir(b.Snapshot)], named[m.logFile(b.Snapshot)] = true, true
				if b.Fetch != nil {
					named[m.orderFile(b.Snapshot)], named[m.partsDir(b.Fetch.Digest)] = true, true
				}
				return nil
			}),
			checkpoints.Each(tx, "", func(_ string, c sandbox.Checkpoint) error {
				named[m.checkpointDir(c.ID)] = true
				return nil
			}))
	})
	if err != nil {
		return err
	}
	// Files that were being written when a daemon was killed.
	for _, dir := range []string{imagesDir, snapshotsDir, checkpointsDir} {
		if err := snapshot.CleanTemp(filepath.Join(m.cfg.Dir, dir)); err != nil {
			return err
		}
	}
	for dir, remove := range map[string]func(string) error{
		machinesDir:    func(path string) error { return m.cfg.Engine.Remove(ctx, path) },
		imagesDir:      snapshot.Remove,
		snapshotsDir:   snapshot.Remove,
		checkpointsDir: snapshot.Remove,
		logsDir:        os.Remove,
		fetchingDir:    os.RemoveAll,
	} {
		entries, err := os.ReadDir(filepath.Join(m.cfg.Dir, dir))
		if err != nil {
			return err
		}
		for _, e := range entries {
			path := filepath.Join(m.cfg.Dir, dir, e.Name())
			if !named[path] && !named[buildlog.Base(path)] { // a log may consist of several files
				if err := remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("remove what is left in %s: %w", path, err)
				}
			}
		}
	}
	return nil
}
