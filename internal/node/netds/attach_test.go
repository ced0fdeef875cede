package netds

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/network/netctl"
	"agentrun.dev/internal/network/networktest"
	"agentrun.dev/internal/sandbox"
	"golang.org/x/sys/unix"
)

// words is a log that is read while it is written.
type words struct {
	mu  sync.Mutex
	all bytes.Buffer // mu protects it
}

func (w *words) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.all.Write(b)
}

func (w *words) count(text string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Count(w.all.String(), text)
}

func (w *words) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all.Reset()
}

// failing is a machine whose wire is not given out the first times that it is asked for.
type failing struct {
	machine
	times atomic.Int32
	given chan struct{}
}

func (m *failing) Wire() (*os.File, error) {
	if m.times.Add(-1) >= 0 {
		return nil, errors.New("not yet")
	}
	defer func() { m.given <- struct{}{} }()
	return m.machine.Wire()
}

// TestWireIsTriedAgain: a sandbox whose wire could not be given to the netd that came after one
// that was killed is connected as soon as it can be.
func TestWireIsTriedAgain(t *testing.T) {
	h, to := newHosts(t), echo(t)
	var log words
	h.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	n := New(h.cfg)
	defer func() { _ = n.Close() }()
	g := networktest.New(t)
	at := joint(t, "a", g, to)
	m := &failing{machine: at.Wire.(machine), given: make(chan struct{}, 1)}
	at.Wire = m
	if err := n.Join(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	<-m.given
	m.times.Store(2)
	first, _ := h.process(t, "default")
	if err := unix.Kill(first.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-m.given
	ns := n.of("default")
	ns.turn.Lock() // whoever attaches has it
	ns.mu.Lock()
	lacking := len(ns.lacking)
	ns.mu.Unlock()
	ns.turn.Unlock()
	if err := speaks(t, g, to); err != nil || lacking != 0 {
		t.Errorf("%d machines lack a wire: %v", lacking, err)
	}
	if log.count("it is tried again") != 1 || log.count("has its network again") != 1 {
		t.Errorf("the log: %s", log.all.String())
	}
	n.Leave(at)
}

// refusing answers requests of the kinds that are refused at the time with an error.
type refusing struct{ kinds sync.Map }

func (r *refusing) answer(request netctl.Request) *netctl.Reply {
	kind := any(nil)
	switch m := request.(type) {
	case *netctl.OfWire:
		kind = m.Kind
	case *netctl.SetPolicy:
		kind = netctl.KindSetPolicy
	case *netctl.Attach:
		kind = netctl.KindAttach
	case *netctl.Simple:
		return &netctl.Reply{ID: m.ID, Data: netctl.MarshalResult(&netctl.Wires{})}
	}
	if err, refused := r.kinds.Load(kind); refused {
		return netctl.Fail(request.RequestID(), err.(error))
	}
	return yes(request)
}

// next returns the netd's next request about a wire.
func (l *listener) next(t *testing.T) (netctl.Kind, netctl.ID) {
	t.Helper()
	for {
		switch m := (<-l.told).(type) {
		case *netctl.OfWire:
			return m.Kind, m.Wire
		case *netctl.SetPolicy:
			return netctl.KindSetPolicy, m.Wire
		case *netctl.Attach:
			return netctl.KindAttach, m.Wire.ID
		}
	}
}

func (l *listener) want(t *testing.T, id netctl.ID, kinds ...netctl.Kind) {
	t.Helper()
	for _, kind := range kinds {
		if k, of := l.next(t); k != kind || of != id {
			t.Fatalf("request of kind %d about %s, want %d about %s", k, of, kind, id)
		}
	}
}

// TestAdoptedThatIsRefused: an adopted sandbox whose rules the netd does not take loses the wire
// with the old ones, and gets it back with the new ones.
func TestAdoptedThatIsRefused(t *testing.T) {
	n, _ := withSettings(t, Config{Dir: t.TempDir(), Log: silent()}, "")
	var netd refusing
	l := newListener(t, n, joint(t, "a", nil), netd.answer)
	ns := n.of("default")
	lacks := func(id sandbox.ID) bool {
		ns.mu.Lock()
		defer ns.mu.Unlock()
		return ns.lacking[id] != ""
	}
	at := joint(t, "b", networktest.New(t))
	at.Adopted = true
	netd.kinds.Store(netctl.KindSetPolicy, errors.New("no"))
	if err := n.Join(t.Context(), at); err != nil {
		t.Fatalf("a sandbox that goes on is not joined: %v", err)
	}
	l.want(t, "b", netctl.KindSetPolicy, netctl.KindDetach)
	if !lacks("b") {
		t.Error("it is not tried again")
	}
	// Now the netd does not have the wire.
	netd.kinds.Store(netctl.KindSetPolicy, netctl.ErrNotFound)
	at.Adopted = false
	if err := n.SetPolicies(t.Context(), at); err != nil {
		t.Error(err)
	}
	l.want(t, "b", netctl.KindSetPolicy, netctl.KindSetPolicy, netctl.KindAttach)
	if lacks("b") {
		t.Error("it has its wire")
	}
}

// TestNothingIsLeftInANetd: a wire that was not attached in the end, or not detached, is taken
// back.
func TestNothingIsLeftInANetd(t *testing.T) {
	n, _ := withSettings(t, Config{Dir: t.TempDir(), Log: silent()}, "")
	var netd refusing
	first := joint(t, "a", nil)
	l := newListener(t, n, first, netd.answer)
	netd.kinds.Store(netctl.KindAttach, errors.New("late"))
	if err := n.Join(t.Context(), joint(t, "b", networktest.New(t))); err == nil {
		t.Error("a wire that was not attached is joined")
	}
	l.want(t, "b", netctl.KindAttach, netctl.KindDetach)
	netd.kinds.Store(netctl.KindDetach, errors.New("busy"))
	n.Leave(first)
	l.want(t, "a", netctl.KindDetach)
	netd.kinds.Delete(netctl.KindDetach)
	ns := n.of("default")
	ns.settle(t.Context(), ns.connected())
	l.want(t, "a", netctl.KindDetach)
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if len(ns.leaving)+len(ns.lacking)+len(ns.joints) > 0 {
		t.Errorf("left: %v, %v, %v", ns.leaving, ns.lacking, ns.joints)
	}
}

// TestAdoptedWithoutAWire: a sandbox of an earlier daemon without an interface gets that error,
// and the log does not say that its network is tried again.
func TestAdoptedWithoutAWire(t *testing.T) {
	h := newHosts(t)
	var log words
	h.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	n := New(h.cfg)
	defer func() { _ = n.Close() }()
	at := joint(t, "none", nil)
	at.Adopted = true
	if err := n.Join(t.Context(), at); !errors.Is(err, engine.ErrNoWire) {
		t.Errorf("joined: %v", err)
	}
	if log.count("tried again") > 0 {
		t.Errorf("the log: %s", log.all.String())
	}
}
