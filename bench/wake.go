package bench

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// WakeConfig configures Wake.
type WakeConfig struct {
	// Guest contains a shell and the usual tools in its root filesystem.
	Guest
	// Fill is how many MiB of the sandbox's /dev/shm are filled with random bytes.
	Fill  int
	Count int
}

// WakeReport is the result of Wake.
type WakeReport struct {
	Engine string `json:"engine"`
	Memory uint64 `json:"memory_bytes"`
	Fill   int    `json:"filled_mib"`
	// Read is reading and hashing the layers that a sandbox was written to, while
	// they are only on disk. Wake is a fork of these layers in that state, until its
	// agent has answered. Fork is the same once more, with the layers in memory. The
	// three take turns, and caches are dropped before Read and Wake.
	Fork Summary `json:"cold_fork"`
	Read Summary `json:"read_and_hash"`
	Wake Summary `json:"wake"`
	// Hibernate is the time from the pause until the sandbox is on disk.
	Hibernate Summary `json:"hibernate"`
	// Ratio is the median of Wake, relative to the sum of the medians of Fork and
	// Read.
	Ratio float64 `json:"ratio"`
}

// Wake measures sandboxes that are hibernated and woken.
func Wake(ctx context.Context, cfg WakeConfig) (_ WakeReport, err error) {
	report := WakeReport{Memory: cfg.Memory, Fill: cfg.Fill}
	from := ForkConfig{Guest: cfg.Guest, Program: "true"}
	source, err := newForkSource(ctx, from)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, source.close()) }()
	report.Engine = string(from.engine())
	var s wakeSamples
	for i := range cfg.Count + 1 {
		if i == 1 { // the first round loads the template
			s = wakeSamples{}
		}
		if err := s.one(ctx, source, cfg, filepath.Join(cfg.Folder, fmt.Sprint("asleep-", i))); err != nil {
			return report, err
		}
	}
	report.Fork, report.Read, report.Wake, report.Hibernate = Summarize(s.fork), Summarize(s.read), Summarize(s.wake), Summarize(s.hibernate)
	report.Ratio = report.Wake.P50 / (report.Fork.P50 + report.Read.P50)
	return report, nil
}

type wakeSamples struct{ fork, read, wake, hibernate []time.Duration }

// one hibernates a sandbox and wakes it.
func (s *wakeSamples) one(ctx context.Context, source *forkSource, cfg WakeConfig, dir string) (err error) {
	sb, err := source.engine.Fork(ctx, source.snap, engine.ForkOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sb.Close()) }()
	fill := fmt.Sprintf("dd if=/dev/urandom of=/dev/shm/fill bs=1M count=%d 2>/dev/null", cfg.Fill)
	if err := execProgram(ctx, sb.Agent(), "sh", "-c", fill); err != nil {
		return err
	}
	begin := time.Now()
	if err := sb.Pause(ctx); err != nil {
		return err
	}
	asleep, err := sb.Snapshot(ctx, dir)
	if err != nil {
		return err
	}
	s.hibernate = append(s.hibernate, time.Since(begin))
	defer func() { err = errors.Join(err, asleep.Close(), snapshot.Remove(dir)) }()
	if err := errors.Join(sb.Close(), dropCaches(dir)); err != nil {
		return err
	}
	begin = time.Now()
	own, err := readOwn(source.snap, asleep)
	if err != nil {
		return err
	}
	s.read = append(s.read, time.Since(begin))
	if err := dropCaches(dir); err != nil {
		return err
	}
	for _, samples := range []*[]time.Duration{&s.wake, &s.fork} {
		begin = time.Now()
		awake, err := source.engine.Fork(ctx, asleep, engine.ForkOptions{KeepIdentity: true})
		if err != nil {
			return err
		}
		*samples = append(*samples, time.Since(begin))
		check := fmt.Sprintf("test $(wc -c < /dev/shm/fill) = %d", cfg.Fill<<20)
		if err := errors.Join(execProgram(ctx, awake.Agent(), "sh", "-c", check), awake.Close()); err != nil {
			return err
		}
	}
	return source.engine.Drop(own)
}

// readOwn reads and hashes the memory layers of a snapshot that it does not share
// with another snapshot, and lists them.
func readOwn(from, of *snapshot.Snapshot) (own []string, err error) {
	shared := map[string]bool{}
	for _, ref := range from.Manifest().MemoryLayers() {
		shared[ref.Digest.String()] = true
	}
	for _, ref := range of.Manifest().MemoryLayers() {
		if shared[ref.Digest.String()] {
			continue
		}
		own = append(own, ref.Digest.String())
		r, err := of.ReadLayer(ref)
		if err != nil {
			return nil, err
		}
		h := sha256.New()
		_, err = io.CopyBuffer(h, struct{ io.Reader }{r}, make([]byte, 1<<20))
		if err = errors.Join(err, r.Close()); err != nil {
			return nil, err
		}
	}
	return own, nil
}

// dropCaches drops a folder's files from the page cache.
func dropCaches(dir string) (err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	return fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := root.Open(path)
		if err != nil {
			return err
		}
		return errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close())
	})
}

// Print writes the report as a table.
func (r WakeReport) Print(w io.Writer) error {
	fmt.Fprintf(w, "sandboxes of %d MiB, %d MiB filled, engine %s; milliseconds\n", r.Memory>>20, r.Fill, r.Engine)
	err := printTable(w, r.Fork, []row{
		{"cold fork", r.Fork}, {"read and hash its layers", r.Read}, {"wake", r.Wake}, {"hibernate", r.Hibernate},
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "waking takes %.2f times as long as a cold fork and reading and hashing its layers\n", r.Ratio)
	return nil
}
