package forkd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/client"
	"agentrun.dev/test/daemon"
	"agentrun.dev/test/soak"
)

// node is a state folder with its daemon.
type node struct {
	*daemon.Daemon
	t *testing.T
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{Daemon: daemon.New(t), t: t}
	t.Cleanup(func() { _ = forget(n.State) })
	return n
}

func (n *node) command(args ...string) *exec.Cmd { return n.Command(context.Background(), args...) }

// up starts a daemon.
func (n *node) up(flags ...string) {
	n.t.Helper()
	n.Up(n.t, flags...)
}

// key makes an API key.
func (n *node) key(role rest.Role) string {
	n.t.Helper()
	made, err := n.Client.CreateKey(n.t.Context(), rest.KeyCreate{Name: "test", Role: role})
	if err != nil {
		n.t.Fatal(err)
	}
	return made.Text
}

// down ends the daemon with agentrun down.
func (n *node) down() {
	n.t.Helper()
	if out, err := n.command("down").CombinedOutput(); err != nil {
		n.t.Errorf("down: %v: %s", err, out)
	}
}

// templateMemory is the memory of these templates, in bytes.
const templateMemory = 128 << 20

// python is a template with a warm interpreter.
func python() rest.TemplateSpec {
	return rest.TemplateSpec{
		Image: "python:3.12-slim", MilliCPUs: 1000, Memory: templateMemory, Warmup: &rest.Program{Language: "python", Text: "warm = 1"},
	}
}

// template makes a template with a pool of two sandboxes.
func (n *node) template(image string) {
	n.t.Helper()
	if out, err := n.command("image", "import", image).CombinedOutput(); err != nil {
		n.t.Fatalf("%v: %s", err, out)
	}
	ctx := n.t.Context()
	_, err := n.Client.PutTemplate(ctx, "python", python())
	if err == nil {
		_, err = n.Client.PutPool(ctx, "pool", rest.PoolSpec{Template: "python", Replicas: 2})
	}
	if err != nil {
		n.t.Fatal(err)
	}
	for {
		p, err := n.Client.Pool(ctx, "pool")
		if err != nil || p.Phase == rest.PhaseFailed {
			n.t.Fatalf("%+v, %v", p, err)
		}
		if p.Ready > 0 {
			return
		}
		time.Sleep(50 * time.Millisecond) // the API has nothing to wait on
	}
}

// told records the sandboxes that clients were told of.
type told struct {
	mu    sync.Mutex // protects all following fields
	holds map[string]string
	maybe map[string]bool // they may exist or not: a call for them was cut off
	// answered are sandboxes that exist, whose content is not known.
	answered map[string]bool
	// saved is the content of the checkpoints that clients were told of.
	saved map[string]string
}

func newTold() *told {
	return &told{holds: map[string]string{}, maybe: map[string]bool{}, answered: map[string]bool{}, saved: map[string]string{}}
}

// answer notes that a sandbox exists.
func (k *told) answer(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.maybe, name)
	k.answered[name] = true
}

// save notes that a checkpoint has the content of its sandbox.
func (k *told) save(checkpoint, of string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.saved[checkpoint] = k.holds[of]
}

func (k *told) set(name, value string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.holds[name] = value
	delete(k.maybe, name)
	delete(k.answered, name)
}

func (k *told) unsure(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.holds, name)
	k.maybe[name] = true
}

// has reports whether the content of a sandbox is known.
func (k *told) has(name string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, found := k.holds[name]
	return found
}

// names lists the sandboxes whose content is known.
func (k *told) names() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.holds))
}

// mark puts a unique value into a sandbox's interpreter and files.
func (n *node) mark(ctx context.Context, name string) (string, error) {
	value := strconv.FormatUint(rand.Uint64(), 36)
	r, err := n.Client.RunCode(ctx, name, rest.CodeRequest{Code: "mine = " + strconv.Quote(value) + "; open('mine', 'w').write(mine)"})
	if err == nil && r.ExitCode != 0 {
		err = fmt.Errorf("mark %s: %+v", name, r)
	}
	return value, err
}

// live claims, uses, forks, hibernates and kills sandboxes until it is cut off.
func (n *node) live(ctx context.Context, known *told, who string, step func()) {
	for i := 0; ctx.Err() == nil; i++ {
		name, fork := fmt.Sprintf("%s-%d", who, i), fmt.Sprintf("%s-%d-f", who, i)
		child := fork + "-1"
		for _, do := range []func() error{
			func() error {
				known.unsure(name)
				_, err := n.Client.CreateSandbox(ctx, rest.SandboxCreate{Name: name, Pool: "pool"}, "")
				return err
			},
			func() error { return n.remark(ctx, known, name) },
			func() error { _, err := n.Client.Do(ctx, name, client.Hibernate); return err },
			func() error {
				_, err := n.Client.Checkpoint(ctx, name, rest.CheckpointCreate{Name: name}, "")
				if err == nil {
					known.save(name, name)
				}
				return err
			},
			func() error {
				known.unsure(child)
				_, err := n.Client.Fork(ctx, name, rest.ForkCreate{Name: fork, Replicas: 1}, "")
				return err
			},
			func() error { return n.remark(ctx, known, child) },
			func() error {
				_, err := n.Client.Checkpoint(ctx, child, rest.CheckpointCreate{Name: child}, "")
				if err == nil {
					known.save(child, child)
				}
				return err
			},
			func() error { _, err := n.Client.Do(ctx, child, client.Pause); return err },
			func() error {
				known.unsure(name)
				_, err := n.Client.Kill(ctx, name)
				return err
			},
		} {
			if err := do(); err != nil {
				if ctx.Err() == nil && !cutOff(err) {
					n.t.Errorf("%s: %v", name, err)
				}
				return
			}
			step()
		}
	}
}

// remark marks a sandbox. A call that is cut off may have marked it or not.
func (n *node) remark(ctx context.Context, known *told, name string) error {
	known.unsure(name)
	value, err := n.mark(ctx, name)
	if err == nil {
		known.set(name, value)
	}
	return err
}

// cutOff reports whether the daemon ended during a call.
func cutOff(err error) bool {
	var refused *client.Error
	return !errors.As(err, &refused) || refused.Code == "shutting_down"
}

// TestKilled: the daemon is killed during all operations, again and again.
// Afterwards each sandbox that a client was told of exists, with its memory and
// files. Every listed sandbox can be used. At the end no process and no file is
// left.
func TestKilled(t *testing.T) {
	n := newNode(t)
	n.up()
	n.template(pythonImage(t))
	workers := soak.Count(6, 2)
	known := newTold()
	for round := range soak.Count(20, 3) {
		ctx, cancel := context.WithCancel(t.Context())
		steps := make(chan struct{}, 1000)
		var all sync.WaitGroup
		for w := range workers {
			who := fmt.Sprintf("r%d-w%d", round, w)
			all.Go(func() { n.live(ctx, known, who, func() { steps <- struct{}{} }) })
		}
		idle := make(chan struct{})
		go func() {
			all.Wait()
			close(idle)
		}()
		for range 1 + rand.IntN(6*workers) {
			select {
			case <-steps:
			case <-idle: // all have failed and reported it
			}
		}
		// The kill comes during one of the next operations.
		time.Sleep(time.Duration(rand.IntN(150)) * time.Millisecond)
		n.Kill()
		cancel()
		<-idle
		n.up()
		n.examine(known)
		n.thin(known, 2*workers)
	}
	for name := range known.holds {
		if _, err := n.Client.Kill(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
	if err := n.Client.DeletePool(t.Context(), "pool"); err != nil {
		t.Error(err)
	}
	n.down()
	for _, dir := range []string{"machines", "images", "checkpoints"} {
		if left, err := filepath.Glob(filepath.Join(n.State, "forkd", dir, "*")); err != nil || len(left) > 0 {
			t.Errorf("left: %q, %v", left, err)
		}
	}
	n.noProcesses()
}

// noProcesses checks that no process runs with the state folder.
func (n *node) noProcesses() {
	n.t.Helper()
	if out, err := exec.Command("pgrep", "-f", n.State).Output(); err == nil {
		n.t.Errorf("processes are left: %s", out)
	}
}

// examine checks all sandboxes after a daemon was killed. It kills those that
// no client was told of.
func (n *node) examine(known *told) {
	n.t.Helper()
	ctx := n.t.Context()
	listed, err := n.Client.Sandboxes(ctx, false)
	if err != nil {
		n.t.Fatal(err)
	}
	there := map[string]bool{}
	for _, s := range listed {
		there[s.Name] = true
		value, sure := known.holds[s.Name]
		if !sure {
			if !known.maybe[s.Name] && !known.answered[s.Name] {
				n.t.Errorf("%s is listed, and nobody asked for it", s.Name)
			}
			if _, err := n.Client.Kill(ctx, s.Name); err != nil {
				n.t.Errorf("%s was listed as %s and cannot be ended: %v", s.Name, s.State, err)
			}
			continue
		}
		r, err := n.Client.RunCode(ctx, s.Name, rest.CodeRequest{Code: "print(mine, open('mine').read())"})
		if got := strings.TrimSpace(r.Stdout); err != nil || got != value+" "+value {
			n.t.Errorf("%s (%s) holds %q and not %q twice: %v %+v", s.Name, s.State, got, value, err, r.Error)
		}
	}
	for _, name := range slices.Concat(slices.Collect(maps.Keys(known.holds)), slices.Collect(maps.Keys(known.answered))) {
		if !there[name] {
			n.t.Errorf("%s is lost", name)
		}
	}
	clear(known.maybe)
	clear(known.answered)
	n.t.Logf("%d sandboxes, %d of them known well; %d checkpoints", len(listed), len(known.holds), len(known.saved))
	n.examineCheckpoints(known)
}

// thin kills sandboxes above the number most, because they would fill the host.
// The others live on under another daemon, or have seen several.
func (n *node) thin(known *told, most int) {
	n.t.Helper()
	for name := range known.holds {
		if len(known.holds) <= most {
			return
		}
		delete(known.holds, name)
		if _, err := n.Client.Kill(n.t.Context(), name); err != nil {
			n.t.Error(err)
		}
	}
}

// examineCheckpoints restores and then deletes all checkpoints.
func (n *node) examineCheckpoints(known *told) {
	n.t.Helper()
	ctx := n.t.Context()
	list, err := n.Client.Checkpoints(ctx)
	if err != nil {
		n.t.Fatal(err)
	}
	there := map[string]bool{}
	for _, c := range list {
		there[c.Name] = true
		s, err := n.Client.Restore(ctx, c.Name, rest.CheckpointRestore{}, "")
		if err != nil {
			n.t.Errorf("checkpoint %s is listed and cannot be restored: %v", c.Name, err)
			continue
		}
		r, err := n.Client.RunCode(ctx, s.Name, rest.CodeRequest{Code: "print(mine, open('mine').read())"})
		if value, sure := known.saved[c.Name]; err != nil || sure && strings.TrimSpace(r.Stdout) != value+" "+value {
			n.t.Errorf("checkpoint %s holds %q and not %q twice: %v %+v", c.Name, r.Stdout, value, err, r.Error)
		}
		if _, err := n.Client.Kill(ctx, s.Name); err != nil {
			n.t.Error(err)
		}
		if err := n.Client.DeleteCheckpoint(ctx, c.Name); err != nil {
			n.t.Error(err)
		}
	}
	for name := range known.saved {
		if !there[name] {
			n.t.Errorf("checkpoint %s is lost", name)
		}
	}
	known.saved = map[string]string{}
}
