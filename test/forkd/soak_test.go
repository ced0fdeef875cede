package forkd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/test/soak"
	"golang.org/x/sys/unix"
)

// usage is the use of the machine's resources by a daemon and its sandboxes.
type usage struct {
	Descriptors, Threads, Goroutines int
	Memory                           int64 // the daemon's own, in bytes
	Mounts                           int
	Machines                         int
	// Disk is the size of the state folder without the journal, which keeps the
	// history, and without the logs.
	Files int
	Disk  int64
}

// look waits until the node is idle, and then measures until two measurements
// agree, because the daemon needs time to close the connections that its
// clients have left.
func (n *node) look() usage {
	n.t.Helper()
	n.rest()
	last := n.measure()
	for range 100 {
		n.Client.Close()
		time.Sleep(100 * time.Millisecond) // there is no event for it
		now := n.measure()
		if now.Descriptors == last.Descriptors && now.Goroutines == last.Goroutines {
			return now
		}
		last = now
	}
	return last
}

func (n *node) measure() (u usage) {
	n.t.Helper()
	proc := filepath.Join("/proc", strconv.Itoa(n.PID()))
	entries := func(dir string) int {
		list, err := os.ReadDir(dir)
		if err != nil {
			n.t.Fatal(err)
		}
		return len(list)
	}
	u.Descriptors, u.Threads = entries(filepath.Join(proc, "fd")), entries(filepath.Join(proc, "task"))
	u.Goroutines = n.Goroutines(n.t)
	u.Machines = entries(filepath.Join(n.State, "forkd", "machines"))
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			if err != nil {
				n.t.Fatal(err)
			}
			u.Memory = kib << 10
		}
	}
	mounts, err := os.ReadFile(filepath.Join(proc, "mountinfo"))
	if err != nil {
		n.t.Fatal(err)
	}
	u.Mounts = bytes.Count(mounts, []byte("\n"))
	err = filepath.WalkDir(n.State, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.Contains(filepath.Base(path), "journal") || filepath.Ext(path) == ".log" {
			return err
		}
		info, err := d.Info()
		if err == nil {
			u.Files++
			u.Disk += info.Size()
		}
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return u
}

// rest waits until there is no sandbox and the pool is full.
func (n *node) rest() {
	n.t.Helper()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) { // the API has nothing to wait on
		p, err := n.Client.Pool(n.t.Context(), "pool")
		if err != nil {
			n.t.Fatal(err)
		}
		left, err := n.Client.Sandboxes(n.t.Context(), false)
		if err != nil {
			n.t.Fatal(err)
		}
		if len(left) == 0 && p.Ready == p.Spec.Replicas {
			return
		}
		if time.Since(begin) > 5*time.Minute {
			n.t.Fatalf("the daemon does not come to rest: %+v, %d sandboxes", p, len(left))
		}
	}
}

// traces are the processes and cgroups of sandboxes that were seen. Other tests
// have their own at the same time.
type traces struct {
	mu        sync.Mutex // protects all following fields
	processes map[procid.ID]bool
	groups    map[string]bool
}

// note adds the existing processes and cgroups.
func (s *traces) note(n *node) {
	machines, err := filepath.Glob(filepath.Join(n.State, "forkd", "machines", "*"))
	if err != nil {
		n.t.Error(err)
	}
	for _, m := range machines {
		r, err := folder.Folder(m).Read()
		if err != nil {
			continue // it is being made, or has ended
		}
		s.add(r.Process)
	}
}

// add notes a process of a sandbox.
func (s *traces) add(p procid.ID) {
	b, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.PID), "cgroup")) // it may have ended
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.groups == nil {
		s.groups, s.processes = map[string]bool{}, map[procid.ID]bool{}
	}
	for line := range strings.Lines(string(b)) {
		name := filepath.Base(strings.TrimSpace(line))
		if strings.HasPrefix(name, "gvisor-") || strings.HasPrefix(name, "vm-") {
			s.groups[name] = true
			s.processes[p] = true
		}
	}
}

// emptyGroups returns the existing cgroups that have no process.
func emptyGroups(t *testing.T, names map[string]bool) (empty []string) {
	t.Helper()
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil // it was removed meanwhile
		}
		if err != nil || d.Name() != "cgroup.procs" || !names[filepath.Base(filepath.Dir(path))] {
			return err
		}
		if b, err := os.ReadFile(path); err == nil && len(b) == 0 {
			empty = append(empty, filepath.Dir(path))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return empty
}

// nothingLeft compares the use of resources with that before.
func (n *node) nothingLeft(before usage, seen *traces, clients int) {
	n.t.Helper()
	after := n.look()
	n.t.Logf("before %+v", before)
	n.t.Logf("after  %+v", after)
	// The runtime keeps its threads, and the history of a sandbox takes a few
	// hundred bytes. If every sandbox left anything behind, the sum would be far
	// larger.
	const few, slack = 8, 64 << 20
	if after.Descriptors > before.Descriptors+few || after.Threads > before.Threads+few+clients || after.Goroutines > before.Goroutines+few || after.Memory > before.Memory+slack ||
		after.Mounts > before.Mounts || after.Machines > before.Machines || after.Files > before.Files || after.Disk > before.Disk+before.Disk/4 {
		n.t.Error("something is left")
	}
	n.noGroups(seen)
}

// noGroups waits until all cgroups of ended sandboxes are removed.
func (n *node) noGroups(seen *traces) {
	n.t.Helper()
	if len(seen.groups) == 0 {
		n.t.Error("no sandbox was seen")
	}
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) { // there is no event for it
		left := emptyGroups(n.t, seen.groups)
		if len(left) == 0 {
			return
		}
		if time.Since(begin) > time.Minute {
			n.t.Errorf("cgroups are left: %q", left)
			return
		}
	}
}

// TestClaimsAndKills: sandboxes that were claimed and killed leave nothing
// behind.
func TestClaimsAndKills(t *testing.T) {
	n := newNode(t)
	n.up()
	n.template(pythonImage(t))
	cycle := func(name string, seen *traces) error {
		_, err := n.Client.CreateSandbox(t.Context(), rest.SandboxCreate{Name: name, Pool: "pool"}, "")
		if err == nil {
			_, err = n.mark(t.Context(), name)
		}
		if err == nil {
			seen.note(n) // this one is certainly alive now
			_, err = n.Client.Kill(t.Context(), name)
		}
		return err
	}
	if err := cycle("first", new(traces)); err != nil { // the first one makes things that stay
		t.Fatal(err)
	}
	cycles := soak.Count(1000, 12)
	if kind, _ := pick.Choose(pick.Auto); kind == pick.MicroVM {
		cycles = soak.Count(200, 4)
	}
	before := n.look()
	var seen traces
	var next atomic.Int64
	const clients = 4
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for i := next.Add(1); i <= int64(cycles); i = next.Add(1) {
				if err := cycle(fmt.Sprintf("cycle-%d", i), &seen); err != nil {
					t.Errorf("cycle %d: %v", i, err)
				}
			}
		})
	}
	all.Wait()
	n.nothingLeft(before, &seen, clients)
	n.end(&seen)
}

// end deletes the pool and ends the daemon, and checks that no process is left.
func (n *node) end(seen *traces) {
	n.t.Helper()
	if err := n.Client.DeletePool(n.t.Context(), "pool"); err != nil {
		n.t.Error(err)
	}
	n.down()
	n.noProcesses()
	for p := range seen.processes {
		if p.Alive() {
			n.t.Errorf("process %d is left", p.PID)
		}
	}
}

// user is a client of the soak with sandboxes of its own.
type user struct {
	*node
	name string
	made int
	// holds has the values that the sandboxes remember. The next call wakes
	// those that are hibernated.
	holds map[string]string
}

// mostSandboxes is the greatest number of sandboxes that a user has at a time.
const mostSandboxes = 4

// step does one random operation and returns its name.
func (u *user) step(ctx context.Context) (what string, err error) {
	names := make([]string, 0, len(u.holds))
	for name := range u.holds {
		names = append(names, name)
	}
	if len(names) == 0 {
		return "claim", u.claim(ctx)
	}
	name := names[rand.IntN(len(names))]
	switch p := rand.IntN(100); {
	case p < 12 && len(names) < mostSandboxes:
		return "claim", u.claim(ctx)
	case p < 28:
		delete(u.holds, name)
		_, err := u.Client.Kill(ctx, name)
		return "kill", err
	case p < 48 && len(names) < mostSandboxes:
		return "fork", u.fork(ctx, name)
	case p < 52:
		_, err := u.Client.Do(ctx, name, client.Hibernate)
		return "hibernate", err
	case p < 56:
		_, err := u.Client.Do(ctx, name, client.Resume)
		return "resume", err
	case p < 78:
		return "code", u.check(ctx, name)
	case p < 91:
		r, err := u.Client.Run(ctx, name, rest.ExecRequest{Argv: []string{"cat", "mine"}})
		if err == nil && r.Stdout != u.holds[name] {
			err = fmt.Errorf("the file of %s has %q, want %q", name, r.Stdout, u.holds[name])
		}
		return "exec", err
	default:
		var out strings.Builder
		err := u.Client.ReadFile(ctx, name, "mine", &out)
		if err == nil && out.String() != u.holds[name] {
			err = fmt.Errorf("the file of %s reads %q, want %q", name, out.String(), u.holds[name])
		}
		return "file", err
	}
}

func (u *user) claim(ctx context.Context) error {
	u.made++
	name := fmt.Sprintf("%s-%d", u.name, u.made)
	if _, err := u.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: "pool"}, ""); err != nil {
		return err
	}
	value, err := u.mark(ctx, name)
	u.holds[name] = value
	return err
}

// fork makes a child, which must hold the value of its parent.
func (u *user) fork(ctx context.Context, name string) error {
	u.made++
	fork := fmt.Sprintf("%s-%d", u.name, u.made)
	f, err := u.Client.Fork(ctx, name, rest.ForkCreate{Name: fork, Replicas: 1}, "")
	if err != nil {
		return err
	}
	if len(f.Children) != 1 || f.Children[0].Problem != "" {
		return fmt.Errorf("fork %s: %+v", fork, f)
	}
	child := f.Children[0].Name
	u.holds[child] = u.holds[name]
	return u.check(ctx, child)
}

func (u *user) check(ctx context.Context, name string) error {
	r, err := u.Client.RunCode(ctx, name, rest.CodeRequest{Code: "print(mine, end='')"})
	if err == nil && r.Stdout != u.holds[name] {
		err = fmt.Errorf("the kernel of %s has %q, want %q: %+v", name, r.Stdout, u.holds[name], r.Error)
	}
	return err
}

// TestSoak: many clients do all operations at the same time. No call fails, no
// sandbox sees another's state, and no files, processes or cgroups are left.
func TestSoak(t *testing.T) {
	n := newNode(t)
	n.up()
	n.template(pythonImage(t))
	clients, steps := soak.Count(20, 4), soak.Count(10000, 120)
	var mu sync.Mutex // protects done
	done := map[string]int{}
	var seen traces
	work := func(u *user, steps int) {
		for i := range steps {
			if i%10 == 0 {
				seen.note(n)
			}
			what, err := u.step(t.Context())
			if err != nil {
				t.Errorf("%s: %s: %v", u.name, what, err)
			}
			mu.Lock()
			done[what]++
			mu.Unlock()
		}
		for name := range u.holds {
			if _, err := u.Client.Kill(t.Context(), name); err != nil {
				t.Error(err)
			}
		}
	}
	newUser := func(name string) *user { return &user{node: n, name: name, holds: map[string]string{}} }
	work(newUser("first"), 20) // the first one makes things that stay
	before := n.look()
	clear(done)
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() { work(newUser(fmt.Sprintf("user-%d", i)), steps/clients) })
	}
	all.Wait()
	t.Logf("did %v", done)
	// A short run may have another mix by chance.
	share := func(of ...string) (percent int) {
		for _, what := range of {
			percent += 100 * done[what]
		}
		return percent / steps
	}
	if steps > 1000 && (share("claim", "kill") < 20 || share("fork") < 10 || share("hibernate", "resume") < 5) {
		t.Error("that was not the mix that is asked for")
	}
	n.nothingLeft(before, &seen, clients)
	n.end(&seen)
}
