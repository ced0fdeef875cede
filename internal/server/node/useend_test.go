package node

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// beforeUse does something before each use of a sandbox.
type beforeUse struct {
	server.Service
	do atomic.Pointer[func()]
}

func (s *beforeUse) Use(ctx context.Context, k sandbox.Key) (sandbox.Session, error) {
	if do := s.do.Load(); do != nil {
		(*do)()
	}
	return s.Service.Use(ctx, k)
}

// TestUseEndsWhileOpened: a sandbox may end after the stream has found it.
func TestUseEndsWhileOpened(t *testing.T) {
	var service beforeUse
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{}, func(cfg *server.Config) {
		service.Service, cfg.Service = cfg.Service, &service
	})
	kill := func() { managertest.Must(u.KillSandbox(u.ctx, &nodev1.KillSandboxRequest{Name: "a"}))(t) }
	service.do.Store(&kill)
	s := managertest.Must(u.UseSandbox(u.ctx))(t)
	if err := s.Send(open("a")); err != nil {
		t.Fatal(err)
	}
	wantRefused(t, until(s), codes.NotFound, "ended", "has ended")
}

// TestUseWakesNoOther: a stream does not wake another sandbox that has the name of its own.
func TestUseWakesNoOther(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	s := u.use()
	managertest.Must(u.KillSandbox(u.ctx, &nodev1.KillSandboxRequest{Name: "a"}))(t)
	managertest.Must(u.ClaimSandbox(u.ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool"}))(t)
	managertest.Must(u.Manager.Hibernate(t.Context(), u.key))(t)
	if out, err := shell(t.Context(), s, "echo ghost"); err == nil {
		t.Errorf("%q of a sandbox that has ended", out)
	}
	if now := managertest.Must(u.Manager.Sandbox(t.Context(), u.key))(t); now.State != sandbox.Hibernated {
		t.Errorf("it is %s", now.State)
	}
}

// TestUseSuccessor: a client that asks for a sandbox by its name gets the one that has the
// name now, also while the stream of the previous one is held open.
func TestUseSuccessor(t *testing.T) {
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{})
	for range 20 {
		s := managertest.Must(u.service.Use(t.Context(), u.key))(t)
		s.Close()
		managertest.Must(u.KillSandbox(u.ctx, &nodev1.KillSandboxRequest{Name: "a"}))(t)
		now := managertest.Must(u.ClaimSandbox(u.ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool"}))(t)
		s, err := u.service.Use(t.Context(), u.key)
		if err != nil || string(s.Record().ID) != now.GetId() {
			t.Fatalf("%+v, %v", s, err)
		}
		s.Close()
	}
}

// TestUseCountsOnce: a call that finds another sandbox under the name takes nothing from the
// uses of that one.
func TestUseCountsOnce(t *testing.T) {
	var service beforeUse
	u := newUseClient(t, &nodev1.ClaimSandboxRequest{}, func(cfg *server.Config) {
		service.Service, cfg.Service = cfg.Service, &service
	})
	s := u.use()
	replace := func() {
		service.do.Store(nil)
		managertest.Must(u.KillSandbox(u.ctx, &nodev1.KillSandboxRequest{Name: "a"}))(t)
		managertest.Must(u.ClaimSandbox(u.ctx, &nodev1.ClaimSandboxRequest{Name: "a", Pool: "pool", Lifetime: &nodev1.Lifetime{
			IdleTimeout: durationpb.New(200 * time.Millisecond), OnTimeout: nodev1.TimeoutAction_TIMEOUT_ACTION_HIBERNATE,
		}}))(t)
	}
	service.do.Store(&replace)
	if out, err := shell(t.Context(), s, "echo ghost"); err == nil {
		t.Errorf("%q of a sandbox that has ended", out)
	}
	<-s.Agent().Done()
	// Longer than the timeout: it would be cut off by the hibernation.
	now := managertest.Must(u.Manager.Use(t.Context(), u.key))(t)
	defer now.Close()
	if out, err := shell(t.Context(), now, "sleep 0.6; echo awake"); err != nil || out != "awake\n" {
		t.Errorf("it idles while it is used: %q, %v", out, err)
	}
}
