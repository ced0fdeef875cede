// Package node owns the objects of a node and their life: templates, pools,
// sandboxes, forks and checkpoints. Its Manager is the only writer of the
// journal. docs/design/forkd.md has the whole.
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

// Config is what a Manager works with.
type Config struct {
	// Dir is the state folder.
	Dir     string
	Engine  engine.Engine
	Builder Builder
	// Images has the images that the builder finds; nil knows nothing of them.
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
	// StorageReserve is how much of the state folder's disk is kept free of what tenants
	// store, in bytes; 0 is nothing.
	StorageReserve uint64
	// Key seals secrets, and images of sandboxes that hold some; nil is a daemon
	// that takes no secrets.
	Key *seal.Key
	// NodeID is the node's name; empty is one that is made up once, and kept.
	NodeID string
	// Codes are in the ids of sandboxes that the node makes; zero is none.
	Codes sandbox.Codes
	// Boot identifies the host's boot.
	Boot string
	// Commits is what the journal's commits cost, for measurements.
	Commits journal.Cost
	Log     *slog.Logger
	// Observer is told what happens; nil is nobody.
	Observer sandbox.Observer
	// Network is where the interfaces of sandboxes lead; nil is nowhere.
	Network Network
	// Peers is how snapshots of other nodes come here; nil is a daemon that fetches none.
	Peers Peers
	// Serves bounds what other nodes read.
	Serves peer.Limits
}

// Manager owns the objects of a node. Its methods are safe for concurrent use.
type Manager struct {
	cfg      Config
	observer sandbox.Observer
	db       *journal.DB
	capacity *admission
	// turns are those of machines that start. buildTurns are of builds, captureTurns of
	// sandboxes that hibernate, are checkpointed or forked, adoptTurns of adoptions.
	// fetchTurns are of snapshots that are fetched, lookupTurns of questions to registries.
	turns, buildTurns, fetchTurns, captureTurns, adoptTurns, lookupTurns *turns

	secrets *secretStore
	logins  *loginStore
	// authorities are the CAs of namespaces, injections the machines that are shown them.
	authorities *authorityStore
	injections  injections
	ctx         context.Context // ends when the manager closes
	cancel      context.CancelFunc
	work        sync.WaitGroup // all goroutines
	dirty       chan struct{}  // holds at most one notice that something was removed
	// id is the node's name, processor what sandboxes see of it.
	id        string
	processor engine.Processor
	cordon    *cordon
	changes   *changes
	tally     *tally
	watchers  watchers
	// watchesBegin holds a token for each watch that reads all that there is.
	watchesBegin chan struct{}
	// statusChanged holds at most one notice that what a pool or the node has may have
	// changed.
	statusChanged chan struct{}
	history       history
	forked        chan struct{} // holds at most one notice that there are many new forks
	newForks      atomic.Int64
	// adopted is closed when each machine of an earlier daemon was tried once.
	adopted chan struct{}

	// room is that of the state folder's disk.
	room *room

	quotaTurn  sync.Mutex // held by who changes a quota
	cordonTurn sync.Mutex // likewise the cordon
	imageTurn  sync.Mutex // held by who pulls or drops an image of a template
	poolTurns  keyTurns   // of those who apply or delete a pool
	ownerTurns textTurns  // of those who claim for an owner
	partsTurns textTurns  // of those who use what is fetched of a snapshot
	serves     *peer.Server

	templateTurns keyTurns // likewise of a template

	mu        sync.Mutex // protects all following fields
	closed    bool
	roster    roster
	pools     map[sandbox.Key]*pool
	builds    map[buildKey]*build // those under way
	places    buildPlaces
	requests  map[string]*request        // those with an idempotency key, likewise
	restoring map[sandbox.Key]int        // checkpoints that sandboxes are being made of; -1 is one that is being deleted
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

// Open opens the state folder, takes over what is still running and goes on
// with what was under way.
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
		// Of two starts on one processor one can work while the other waits, and pools
		// leave one of two turns to claims.
		cfg.Starts = max(2, runtime.NumCPU())
	}
	if cfg.Builds < 1 {
		cfg.Builds = max(2, runtime.NumCPU()) // a namespace has at most half of them
	}
	if cfg.Captures < 1 {
		cfg.Captures = max(4, runtime.NumCPU()) // much of one is to wait for the disk
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

// Close lets go of everything. Sandboxes run on; the next Open finds them.
func (m *Manager) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	running := m.pools
	m.pools = map[sandbox.Key]*pool{}
	members := slices.Collect(maps.Values(m.roster.byID)) // claims that are refused now leave it
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

// begin is called before anything is changed.
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

// Folders of the state folder.
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

// recover brings journal, machines and files into line, in the order that
// docs/design/forkd.md gives.
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
	// What a daemon that was killed has left in memory nobody is charged for.
	if err := errors.Join(m.sweep(ctx), m.recoverStorage(), m.keep(machinesDir), m.recoverSnapshots()); err != nil {
		return err
	}
	if err := errors.Join(m.recoverPools(), m.recoverBuilds()); err != nil {
		return err
	}
	m.adoptAll()
	m.work.Go(m.keepPrograms) // an earlier daemon may not have come to it
	// So that whoever asks first need not wait for all; it is told what went wrong.
	m.work.Go(func() { _, _ = m.CheckpointBytes() })
	return nil
}

// startInTurn is startMachine when it is the turn of a machine that a user of a
// namespace waits for.
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

// settle decides what an intent has come to.
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
		return nil // nobody who watches need be told
	}
	s.Unresponsive = "" // this daemon finds out by itself
	return sandboxes.Write(tx, string(s.ID), s)
}

// sweep removes what no object names.
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
	// What was being written when somebody was killed.
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
			if !named[path] && !named[buildlog.Base(path)] { // a log may be in several files
				if err := remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("remove what is left in %s: %w", path, err)
				}
			}
		}
	}
	return nil
}
