package node

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
)

// network remembers the joined machines.
type network struct {
	mu       sync.Mutex // protects all following fields
	joined   map[sandbox.ID]Joint
	joins    []Joint       // all that there were
	builds   policy.Policy // the policy for builds whose template does not set one
	captures int           // that were begun and not collected
	noWire   bool
	refuse   error // the error of SetPolicies
	kept     int
	// follower is closed when a machine leaves whose log somebody waits for.
	follower chan struct{}
}

func newNetwork() *network {
	return &network{joined: map[sandbox.ID]Joint{}, builds: policy.Policy{Egress: policy.AllowByDefault}}
}

func (n *network) Join(_ context.Context, at Joint) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.noWire {
		return engine.ErrNoWire
	}
	n.joined[at.Machine] = at
	n.joins = append(n.joins, at)
	return nil
}

func (n *network) change(at Joint, do func(*Joint)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	j, ok := n.joined[at.Machine]
	if !ok {
		panic("a machine that is not joined")
	}
	do(&j)
	n.joined[at.Machine] = j
}

func (n *network) SetPolicies(_ context.Context, at Joint) error {
	if n.refuse != nil {
		return n.refuse
	}
	n.change(at, func(j *Joint) { j.Policies, j.Injections = at.Policies, at.Injections })
	return nil
}

func (n *network) Leave(at Joint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.joined, at.Machine)
	if n.follower != nil {
		close(n.follower)
		n.follower = nil
	}
}

func (n *network) Pause(_ context.Context, at Joint) {
	n.change(at, func(j *Joint) { j.Paused = true })
}

func (n *network) Resume(_ context.Context, at Joint) {
	n.change(at, func(j *Joint) { j.Paused = false })
}

// inherited is the lineage for machines that continue from a machine.
func inherited(of sandbox.ID) *sandbox.Lineage {
	return &sandbox.Lineage{Pins: []sandbox.Pin{{Name: string(of), Addr: netip.MustParseAddr("192.0.2.1")}}}
}

func (n *network) Capture(_ context.Context, at Joint) func(context.Context) *sandbox.Lineage {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.captures++
	return func(context.Context) *sandbox.Lineage {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.captures--
		return inherited(at.Machine)
	}
}

func (n *network) Traffic(_ context.Context, at Joint, r sandbox.TrafficRequest) (sandbox.TrafficPage, error) {
	if r.Wait > 0 {
		left := make(chan struct{})
		n.mu.Lock()
		n.follower = left
		n.mu.Unlock()
		<-left
		return sandbox.TrafficPage{}, errors.New("the machine has left")
	}
	return sandbox.TrafficPage{Entries: []sandbox.Traffic{{Seq: r.From, Name: string(at.Machine)}}, Next: r.From + 1}, nil
}

func (n *network) Keep(context.Context) error { n.kept++; return nil }

func (n *network) Use(context.Context, sandbox.Namespace) map[sandbox.ID]sandbox.NetworkUse {
	return nil
}

func (n *network) BuildPolicy() policy.Policy {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.builds
}

// of is how the machine of a sandbox is joined.
func (n *network) of(t *testing.T, m *Manager, name string) (Joint, bool) {
	t.Helper()
	s, err := m.Sandbox(t.Context(), key(name))
	if err != nil {
		t.Fatal(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	j, ok := n.joined[s.Machine]
	return j, ok
}

// wantPolicies compares what holds for a sandbox with policies in JSON.
func (n *network) wantPolicies(t *testing.T, m *Manager, name, want string) {
	t.Helper()
	j, ok := n.of(t, m, name)
	b, err := json.Marshal(j.Policies)
	if err != nil || !ok || string(b) != want {
		t.Errorf("%s is joined %t with %s, %v; want %s", name, ok, b, err, want)
	}
}

func rules(t *testing.T, egress string, allow ...string) *policy.Policy {
	t.Helper()
	p, err := policy.Parse(egress, allow, nil)
	if err != nil {
		t.Fatal(err)
	}
	return &p
}

// networked opens a daemon with a network, a template with a policy, and a pool.
func networked(t *testing.T, dir string, h *nodetest.Host, n *network, may *policy.Policy) *Manager {
	t.Helper()
	m := daemon(t, dir, h, func(c *Config) { c.Network = n })
	spec := sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib, NetworkPolicy: may}
	if _, err := m.ApplyTemplate(t.Context(), key("python"), spec); err != nil {
		t.Fatal(err)
	}
	if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.WaitPool(t.Context(), key("pool")); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	return m
}

func claimWith(t *testing.T, m *Manager, name string, own *policy.Policy) error {
	t.Helper()
	_, _, err := m.Claim(t.Context(), sandbox.ClaimRequest{Key: key(name), Spec: sandbox.ClaimSpec{Pool: "pool", NetworkPolicy: own}})
	return err
}

// TestNetworkPolicies: a sandbox is joined from its claim to its end, with its
// template's policy, its own, and those of its sources; a template's policy changes
// without a build, for claims from then on.
func TestNetworkPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		m := networked(t, t.TempDir(), nodetest.NewHost(t), n, rules(t, "deny", "a.example"))
		defer func() { _ = m.Close() }()
		if len(n.joined) != 0 {
			t.Errorf("what waits in a pool is joined: %v", n.joined)
		}
		const template = `{"egress":"deny","allow":["a.example"]}`
		if err := errors.Join(claimWith(t, m, "plain", nil), claimWith(t, m, "own", rules(t, "allow"))); err != nil {
			t.Fatal(err)
		}
		n.wantPolicies(t, m, "plain", `[`+template+`]`)
		n.wantPolicies(t, m, "own", `[`+template+`,{"egress":"allow"}]`)

		fork := sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "own", Replicas: 1, NetworkPolicy: rules(t, "deny")}}
		if _, _, err := m.Fork(t.Context(), fork); err != nil {
			t.Fatal(err)
		}
		n.wantPolicies(t, m, "f-1", `[`+template+`,{"egress":"allow"},{"egress":"deny"}]`)

		if _, err := m.SetNetworkPolicy(t.Context(), key("own"), rules(t, "deny", "b.example")); err != nil {
			t.Fatal(err)
		}
		n.wantPolicies(t, m, "own", `[`+template+`,{"egress":"deny","allow":["b.example"]}]`)
		n.wantPolicies(t, m, "f-1", `[`+template+`,{"egress":"allow"},{"egress":"deny"}]`)
		if _, err := m.SetNetworkPolicy(t.Context(), key("own"), nil); err != nil {
			t.Fatal(err)
		}
		n.wantPolicies(t, m, "own", `[`+template+`]`)

		revision := wantState(t, m, "plain", sandbox.Running).Revision
		spec := sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}
		if _, err := m.ApplyTemplate(t.Context(), key("python"), spec); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := claimWith(t, m, "later", nil); err != nil {
			t.Fatal(err)
		}
		if got := wantState(t, m, "later", sandbox.Running).Revision; got != revision {
			t.Errorf("another policy is another revision: %s, %s", revision, got)
		}
		n.wantPolicies(t, m, "later", `[{"egress":"deny"}]`)
		n.wantPolicies(t, m, "plain", `[`+template+`]`)
		for _, own := range []*policy.Policy{rules(t, "allow"), rules(t, "deny", "a.example")} {
			if err := claimWith(t, m, "wide", own); !sandbox.HasCode(err, sandbox.CodeInvalid) || !strings.Contains(err.Error(), "networkPolicy") {
				t.Errorf("a claim of a template that allows nothing: %v", err)
			}
		}
		for _, name := range []string{"plain", "own", "f-1", "later"} {
			if _, err := m.Kill(t.Context(), key(name)); err != nil {
				t.Fatal(err)
			}
		}
		if len(n.joined) != 0 {
			t.Errorf("still joined: %v", slices.Collect(maps.Keys(n.joined)))
		}
	})
}

// TestFollowTraffic: a client that follows the log of a sandbox learns why the sandbox
// has lost its machine, or that there are no entries. No client asks without end.
func TestFollowTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		m := networked(t, t.TempDir(), nodetest.NewHost(t), n, rules(t, "deny"))
		defer func() { _ = m.Close() }()
		if err := claimWith(t, m, "a", nil); err != nil {
			t.Fatal(err)
		}
		follow := sandbox.TrafficRequest{Key: key("a"), From: 7, Wait: sandbox.MaxTrafficWait}
		type answer struct {
			page sandbox.TrafficPage
			err  error
		}
		during := func(do func(context.Context, sandbox.Key, ...sandbox.Precondition) (sandbox.Sandbox, error)) answer {
			answers := make(chan answer, 1)
			go func() {
				page, err := m.Traffic(t.Context(), follow)
				answers <- answer{page, err}
			}()
			synctest.Wait()
			if _, err := do(t.Context(), key("a")); err != nil {
				t.Fatal(err)
			}
			return <-answers
		}
		if got := during(m.Hibernate); got.err != nil || len(got.page.Entries) != 0 || got.page.Next != 7 {
			t.Errorf("hibernated meanwhile: %+v", got)
		}
		begin := time.Now()
		if page, err := m.Traffic(t.Context(), follow); err != nil || len(page.Entries) != 0 || time.Since(begin) != follow.Wait {
			t.Errorf("hibernated: %+v, %v after %v", page, err, time.Since(begin))
		}
		if _, err := m.Resume(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if got := during(m.Kill); got.err != nil && !sandbox.HasCode(got.err, sandbox.CodeEnded) {
			t.Errorf("ended meanwhile: %+v", got)
		}
		if _, err := m.Traffic(t.Context(), follow); !sandbox.HasCode(err, sandbox.CodeEnded) {
			t.Errorf("ended: %v", err)
		}
	})
}

// TestNetworkLineage: a machine that continues from another one is joined with its
// lineage, once. A pause reaches the network.
func TestNetworkLineage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		m := networked(t, t.TempDir(), nodetest.NewHost(t), n, rules(t, "allow"))
		defer func() { _ = m.Close() }()
		if err := claimWith(t, m, "a", nil); err != nil {
			t.Fatal(err)
		}
		source, _ := n.of(t, m, "a")
		if source.Adopted {
			t.Error("a machine of this daemon is said to be adopted")
		}
		wants := func(name string, of *sandbox.Lineage) {
			t.Helper()
			j, ok := n.of(t, m, name)
			if ok && j.Lineage == nil && of == nil {
				return
			}
			if !ok || j.Lineage == nil || of == nil || !slices.Equal(j.Lineage.Pins, of.Pins) {
				t.Errorf("%s is joined %t with %+v; want %+v", name, ok, j.Lineage, of)
			}
		}
		checkpoint(t, m, "c", "a")
		if _, _, err := m.Fork(t.Context(), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 2}}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r"), Checkpoint: "c"}); err != nil {
			t.Fatal(err)
		}
		for _, child := range []string{"f-1", "f-2", "r"} {
			wants(child, inherited(source.Machine))
		}
		if _, err := m.Pause(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if j, _ := n.of(t, m, "a"); !j.Paused {
			t.Error("a pause does not reach the network")
		}
		if _, err := m.Resume(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if j, _ := n.of(t, m, "a"); j.Paused {
			t.Error("a resume does not reach the network")
		}
		if _, err := m.Hibernate(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		if _, ok := n.joined[source.Machine]; ok {
			t.Error("a hibernated sandbox is joined")
		}
		checkpoint(t, m, "asleep", "a")
		if _, err := m.Resume(t.Context(), key("a")); err != nil {
			t.Fatal(err)
		}
		wants("a", inherited(source.Machine))
		if s := wantState(t, m, "a", sandbox.Running); s.Egress.Lineage != nil {
			t.Error("a running sandbox keeps what it has inherited")
		}
		if _, _, err := m.Restore(t.Context(), sandbox.RestoreRequest{Key: key("r2"), Checkpoint: "asleep"}); err != nil {
			t.Fatal(err)
		}
		wants("r2", inherited(source.Machine))
		if n.captures != 0 {
			t.Errorf("%d captures are not collected", n.captures)
		}
		page, err := m.Traffic(t.Context(), sandbox.TrafficRequest{Key: key("r2"), From: 7})
		if j, _ := n.of(t, m, "r2"); err != nil || len(page.Entries) != 1 || page.Entries[0].Name != string(j.Machine) || page.Next != 8 {
			t.Errorf("the log of a sandbox: %+v, %v", page, err)
		}
	})
}

// TestNetworkAdopted: the next daemon joins running machines with the policies of
// the journal, including one that the network could not be told.
func TestNetworkAdopted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h, n := t.TempDir(), nodetest.NewHost(t), newNetwork()
		m := networked(t, dir, h, n, rules(t, "allow"))
		if err := errors.Join(claimWith(t, m, "a", nil), claimWith(t, m, "p", nil)); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Pause(t.Context(), key("p")); err != nil {
			t.Fatal(err)
		}
		n.refuse = errors.New("nobody is there")
		if _, err := m.SetNetworkPolicy(t.Context(), key("a"), rules(t, "deny")); !errors.Is(err, n.refuse) {
			t.Errorf("a network that is not there: %v", err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		if len(n.joined) != 2 {
			t.Errorf("the end of a daemon ends connections: %v", n.joined)
		}
		n = newNetwork()
		m = daemon(t, dir, h, func(c *Config) { c.Network = n })
		defer func() { _ = m.Close() }()
		<-m.adopted
		n.wantPolicies(t, m, "a", `[{"egress":"allow"},{"egress":"deny"}]`)
		if j, ok := n.of(t, m, "p"); !ok || !j.Paused || !j.Adopted || n.kept != 1 {
			t.Errorf("a paused one is joined %t, paused %t; kept %d", ok, j.Paused, n.kept)
		}
	})
}

// TestNoInterface: a sandbox without an interface works as long as no policy lets it
// out, and is refused with its name otherwise.
func TestNoInterface(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		n.noWire = true
		m := networked(t, t.TempDir(), nodetest.NewHost(t), n, nil)
		defer func() { _ = m.Close() }()
		if err := claimWith(t, m, "a", rules(t, "deny")); err != nil {
			t.Errorf("a sandbox that wants nothing: %v", err)
		}
		page, err := m.Traffic(t.Context(), sandbox.TrafficRequest{Key: key("a")})
		if err != nil || len(page.Entries) != 0 || page.Next != 1 {
			t.Errorf("its log: %+v, %v", page, err)
		}
		spec := sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib, NetworkPolicy: rules(t, "allow")}
		if _, err := m.ApplyTemplate(t.Context(), key("python"), spec); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := claimWith(t, m, "b", nil); !sandbox.HasCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "interface") {
			t.Errorf("one that wants something: %v", err)
		}
		if _, err := m.Sandbox(t.Context(), key("b")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("what was refused is there: %v", err)
		}
	})
}
