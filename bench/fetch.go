package bench

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
	nodeserver "agentrun.dev/internal/server/node"
	"agentrun.dev/internal/server/remote"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/peer"
	"agentrun.dev/internal/storage/snapshot"
	"golang.org/x/sys/unix"
)

// FetchConfig says what Fetch measures.
type FetchConfig struct {
	// Folder is a new one, on the disk that is measured.
	Folder string
	// Size is that of the snapshot's only layer, in bytes. Random is how much of each page
	// does not compress, in percent.
	Size   uint64
	Random int
	Rounds int
}

// FetchReport is what it found: MiB of content per second.
type FetchReport struct {
	Size   uint64 `json:"size_bytes"`
	Random int    `json:"random_percent"`
	Rounds int    `json:"rounds"`
	// Fetch is from the first call until the snapshot is on disk, over gRPC with mutual TLS from
	// a server in the same process, and from two.
	Fetch Spread `json:"fetch_mib_per_second"`
	Two   Spread `json:"fetch_of_two_mib_per_second"`
	// Copy is cp of the layer to the same disk, and its sync; Link is TLS over loopback, whose
	// content nobody looks at; Hash is reading and hashing the layer once.
	Copy Spread `json:"copy_mib_per_second"`
	Link Spread `json:"link_mib_per_second"`
	Hash Spread `json:"hash_mib_per_second"`
	// The same in seconds of processor time for each GiB, of both ends together: others on the
	// machine change it less.
	FetchCPU float64 `json:"fetch_cpu_s_gib"`
	CopyCPU  float64 `json:"copy_cpu_s_gib"`
	LinkCPU  float64 `json:"link_cpu_s_gib"`
	HashCPU  float64 `json:"hash_cpu_s_gib"`
	// The ratios are of medians.
	ToCopy float64 `json:"ratio_to_copy"`
	ToLink float64 `json:"ratio_to_link"`
}

// Fetch measures a snapshot that a node fetches from another, in turns with what that cannot be
// faster than. Both ends, and so both sides of TLS and zstd, share this machine's processors.
func Fetch(ctx context.Context, cfg FetchConfig) (_ FetchReport, err error) {
	report := FetchReport{Size: cfg.Size, Random: cfg.Random, Rounds: cfg.Rounds}
	f, err := newFetchBench(ctx, cfg)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	var fetched, two, copied, linked, hashed []float64
	var cpu [5]time.Duration
	for range cfg.Rounds {
		for i, part := range []struct {
			do  func(context.Context) error
			out *[]float64
		}{
			{func(ctx context.Context) error { return f.fetch(ctx, 1) }, &fetched},
			{f.copy, &copied}, {f.link, &linked}, {f.hash, &hashed},
			{func(ctx context.Context) error { return f.fetch(ctx, 2) }, &two},
		} {
			begin, used := time.Now(), processorTime()
			if err := part.do(ctx); err != nil {
				return report, err
			}
			cpu[i] += processorTime() - used
			*part.out = append(*part.out, float64(cfg.Size)/(1<<20)/time.Since(begin).Seconds())
		}
	}
	report.Fetch, report.Two, report.Copy, report.Link, report.Hash = SpreadOf(fetched), SpreadOf(two), SpreadOf(copied), SpreadOf(linked), SpreadOf(hashed)
	perGiB := func(i int) float64 { return cpu[i].Seconds() * (1 << 30) / float64(cfg.Size) / float64(cfg.Rounds) }
	report.FetchCPU, report.CopyCPU, report.LinkCPU, report.HashCPU = perGiB(0), perGiB(1), perGiB(2), perGiB(3)
	report.ToCopy, report.ToLink = report.Fetch.P50/report.Copy.P50, report.Fetch.P50/report.Link.P50
	return report, nil
}

// processorTime is what this process and the programs that it has waited for have used.
func processorTime() (total time.Duration) {
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var use unix.Rusage
		if unix.Getrusage(who, &use) == nil { // it fails for no other reason than who
			total += time.Duration(use.Utime.Nano() + use.Stime.Nano())
		}
	}
	return total
}

// Print writes the report for people.
func (r FetchReport) Print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "a snapshot of %d MiB, of each page %d %% random; %d rounds, in MiB/s\n\n", r.Size>>20, r.Random, r.Rounds)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	row := func(name string, s Spread) {
		_, rowErr := fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.0f\t\n", name, s.Min, s.P50, s.Max)
		err = errors.Join(err, rowErr)
	}
	_, headErr := fmt.Fprintln(t, "\tmin\tp50\tmax\t")
	row("fetch from one peer", r.Fetch)
	row("fetch from two peers", r.Two)
	row("cp and sync", r.Copy)
	row("TLS over loopback", r.Link)
	row("read and hash", r.Hash)
	err = errors.Join(err, headErr, t.Flush())
	_, lastErr := fmt.Fprintf(w, "\nfetch is %.2f times cp, %.2f times TLS over loopback; seconds of processor time for each GiB: fetch %.2f (both ends), cp %.2f, TLS %.2f (both ends), read and hash %.2f\n",
		r.ToCopy, r.ToLink, r.FetchCPU, r.CopyCPU, r.LinkCPU, r.HashCPU)
	return errors.Join(err, lastErr)
}

// fetchBench is two nodes that have a snapshot, and one that has not.
type fetchBench struct {
	FetchConfig
	snap  *snapshot.Snapshot
	path  string // of the layer
	files access.MutualFiles
	end   *access.Mutual
	peers []peer.Source
	ends  []func() error
	made  int
}

func newFetchBench(ctx context.Context, cfg FetchConfig) (_ *fetchBench, err error) {
	f := &fetchBench{FetchConfig: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if err := f.makeSnapshot(ctx); err != nil {
		return nil, err
	}
	authority, err := access.OpenAuthority(filepath.Join(cfg.Folder, "tls"))
	if err != nil {
		return nil, err
	}
	f.files = access.MutualFiles{Cert: filepath.Join(cfg.Folder, "node.crt"), Key: filepath.Join(cfg.Folder, "node.key"), CA: authority.File}
	if _, err := authority.Issue(access.Component{Role: access.RoleNode, Name: "n"}, []string{"127.0.0.1"}, time.Hour, f.files.Cert, f.files.Key); err != nil {
		return nil, err
	}
	if f.end, err = access.OpenMutual(f.files); err != nil {
		return nil, err
	}
	for range 2 {
		if err := f.serve(ctx); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (f *fetchBench) close() error {
	var errs []error
	for i := len(f.ends) - 1; i >= 0; i-- {
		errs = append(errs, f.ends[i]())
	}
	return errors.Join(errs...)
}

// fetchPages is content of which a part of each page is random.
type fetchPages struct {
	random int
	from   *rand.ChaCha8
	left   uint64
}

func (p *fetchPages) Read(b []byte) (int, error) {
	if p.left == 0 {
		return 0, io.EOF
	}
	n := int(min(uint64(len(b)), p.left)) / layer.PageSize * layer.PageSize
	text := []byte("what programs have in memory compresses well; ")
	for at := 0; at < n; at += layer.PageSize {
		page := b[at : at+layer.PageSize]
		cut := len(page) * p.random / 100
		_, _ = p.from.Read(page[:cut]) // it never fails
		for rest := page[cut:]; len(rest) > 0; {
			rest = rest[copy(rest, text):]
		}
	}
	p.left -= uint64(n)
	return n, nil
}

func (f *fetchBench) makeSnapshot(ctx context.Context) error {
	dir := filepath.Join(f.Folder, "source")
	var ref layer.Ref
	snap, err := snapshot.Make(dir, func(b *snapshot.Builder) (_ *snapshot.Snapshot, err error) {
		if ref, err = b.StreamLayer(ctx, &fetchPages{random: f.Random, from: rand.NewChaCha8([32]byte{1}), left: f.Size}, f.Size); err != nil {
			return nil, err
		}
		whole := snapshot.StackOf(layer.Stack{Size: ref.Size, Layers: []layer.Ref{ref}, Extents: []layer.Extent{{Length: ref.Size}}})
		return b.Commit(snapshot.Manifest{
			Created: time.Unix(0, 0).UTC(), Kernel: strings.Repeat("ab", 32), TSCKHz: 1, VCPUs: 1, Memory: whole,
			Disks: []snapshot.Disk{{ID: "root", ReadOnly: true, Stack: whole}}, CPU: snapshot.CPU{Profile: "none", Vendor: "none", Family: 1},
		}, []byte("state"))
	})
	if err != nil {
		return err
	}
	f.snap, f.path = snap, filepath.Join(dir, "layers", ref.Digest.String())
	f.ends = append(f.ends, snap.Close)
	return nil
}

// serve starts a node and connects to it.
func (f *fetchBench) serve(ctx context.Context) error {
	name := fmt.Sprint("audit-", len(f.peers))
	trail, err := audit.Open(audit.Config{Dir: filepath.Join(f.Folder, name), Failed: func(error) {}})
	if err != nil {
		return err
	}
	f.ends = append(f.ends, trail.Close)
	s := nodeserver.NewMutual(server.Config{
		Snapshots: &servedSnapshot{f.snap, peer.NewServer(peer.Limits{})}, Authenticator: access.Authenticator{}, Audit: trail, Log: slog.New(slog.DiscardHandler),
	}, f.end)
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	f.ends = append(f.ends, func() error {
		s.Stop()
		return <-served
	})
	conn, err := remote.Dial(remote.Target{Address: l.Addr().String(), Node: "n", Files: f.files, Window: remote.SnapshotWindow})
	if err != nil {
		return err
	}
	f.ends = append(f.ends, conn.Close)
	f.peers = append(f.peers, remotePeer{remote.NewSnapshots(conn), name})
	return nil
}

// servedSnapshot is all that a node here serves.
type servedSnapshot struct {
	snap *snapshot.Snapshot
	from *peer.Server
}

var _ server.Snapshots = (*servedSnapshot)(nil)

func (*servedSnapshot) SnapshotOffer(context.Context, string) (sandbox.Offer, error) {
	return sandbox.Offer{}, errors.New("nobody asks for it here")
}

func (*servedSnapshot) FetchTemplate(context.Context, sandbox.FetchRequest) (sandbox.Template, error) {
	return sandbox.Template{}, errors.New("nobody asks for it here")
}

func (s *servedSnapshot) SnapshotDigests(ctx context.Context, r sandbox.SnapshotRead, from uint32) ([]byte, error) {
	blob, err := layer.ParseDigest(r.Layer)
	if err != nil {
		return nil, err
	}
	leave, err := s.from.Enter(ctx, string(sandbox.PrincipalOf(ctx)))
	if err != nil {
		return nil, err
	}
	defer leave()
	page, err := s.from.Digests(ctx, s.snap, blob, from)
	return page.Page(), err
}

func (s *servedSnapshot) ReadSnapshot(ctx context.Context, r sandbox.SnapshotRead, send func(uint32, []byte) error) error {
	blob, err := layer.ParseDigest(r.Layer)
	if err != nil {
		return err
	}
	leave, err := s.from.Enter(ctx, string(sandbox.PrincipalOf(ctx)))
	if err != nil {
		return err
	}
	defer leave()
	return s.from.Read(ctx, s.snap, blob, r.Parts, send)
}

// remotePeer is such a node, from the other end.
type remotePeer struct {
	from remote.Snapshots
	name string
}

func (p remotePeer) Name() string { return p.name }

func (p remotePeer) Digests(ctx context.Context, snap snapshot.ID, blob layer.Digest, from uint32) (peer.Digests, error) {
	page, err := p.from.Digests(ctx, sandbox.SnapshotRead{Snapshot: snap.String(), Layer: blob.String()}, from)
	if err != nil {
		return nil, err
	}
	return peer.ParsePage(page)
}

func (p remotePeer) Read(ctx context.Context, snap snapshot.ID, blob layer.Digest, parts []uint32, each func(uint32, []byte) error) error {
	return p.from.Read(ctx, sandbox.SnapshotRead{Snapshot: snap.String(), Layer: blob.String(), Parts: parts}, each)
}

// fetch fetches the snapshot from some peers, and removes it.
func (f *fetchBench) fetch(ctx context.Context, peers int) error {
	f.made++
	parts, dir := filepath.Join(f.Folder, fmt.Sprint("parts-", f.made)), filepath.Join(f.Folder, fmt.Sprint("fetched-", f.made))
	snap, _, err := peer.Fetch(ctx, f.snap.Manifest(), parts, dir, peer.Options{Sources: f.peers[:peers]})
	if err != nil {
		return err
	}
	return errors.Join(snap.Close(), os.RemoveAll(parts), snapshot.Remove(dir))
}

// copy has cp copy the layer.
func (f *fetchBench) copy(ctx context.Context) error {
	to := filepath.Join(f.Folder, "copy")
	if out, err := exec.CommandContext(ctx, "cp", "--reflink=never", f.path, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cp: %w: %s", err, out)
	}
	file, err := os.Open(to)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close(), os.Remove(to))
}

// hash reads and hashes the layer.
func (f *fetchBench) hash(ctx context.Context) error { return f.snap.Verify(ctx) }

// link sends the layer over TLS to somebody who throws it away.
func (f *fetchBench) link(ctx context.Context) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	settings := f.end.Now().Server()
	settings.NextProtos, settings.VerifyConnection = nil, nil
	sent := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			err = f.send(tls.Server(conn, settings))
		}
		sent <- errors.Join(err, l.Close())
	}()
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return err
	}
	conn := tls.Client(raw, f.end.Now().Client("n"))
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, conn, make([]byte, 256<<10))
	if err == nil && uint64(n) != f.Size {
		err = fmt.Errorf("%d bytes have come, not %d", n, f.Size)
	}
	return errors.Join(err, conn.Close(), <-sent)
}

func (f *fetchBench) send(conn *tls.Conn) error {
	file, err := os.Open(f.path)
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	_, err = io.CopyBuffer(conn, struct{ io.Reader }{file}, make([]byte, 256<<10))
	return errors.Join(err, file.Close(), conn.Close())
}
