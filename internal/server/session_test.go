package server_test

import (
	"testing"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// claimed is a node with a sandbox, and two servers of it that share what they know.
func claimed(t *testing.T) (one, two server.Config, made sandbox.Sandbox) {
	t.Helper()
	n := managertest.New(t)
	key := func(name sandbox.Name) sandbox.Key {
		return sandbox.Key{Namespace: sandbox.DefaultNamespace, Name: name}
	}
	spec := sandbox.TemplateSpec{Image: "x", MilliCPUs: sandbox.DefaultMilliCPUs, Memory: sandbox.DefaultMemory}
	managertest.Must(n.Manager.ApplyTemplate(t.Context(), key("template"), spec))(t)
	managertest.Must(n.Manager.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "template"}))(t)
	if err := n.Manager.WaitPool(t.Context(), key("pool")); err != nil {
		t.Fatal(err)
	}
	made, _, err := n.Manager.Claim(t.Context(), sandbox.ClaimRequest{Key: key("a"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
	if err != nil {
		t.Fatal(err)
	}
	one = n.Config().WithDefaults()
	two = n.Config()
	two.Contexts = one.Contexts
	return one, two.WithDefaults(), made
}

// TestDefaultContext: it has the sandbox's folder, and one that was closed over another
// server is made again.
func TestDefaultContext(t *testing.T) {
	one, two, made := claimed(t)
	there := func() {
		t.Helper()
		s := managertest.Must(one.Use(t.Context(), made.Key))(t)
		defer s.Close()
		if name := managertest.Must(s.DefaultContext(t.Context(), ""))(t); name != "default" {
			t.Errorf("%q", name)
		}
		all := managertest.Must(s.Agent().ListContexts(t.Context()))(t)
		if len(all) != 1 || all[0].Workdir != made.Workdir {
			t.Errorf("%+v", all)
		}
	}
	there()
	there()
	s := managertest.Must(two.Use(t.Context(), made.Key))(t)
	defer s.Close()
	if err := s.CloseContext(t.Context(), "default"); err != nil {
		t.Fatal(err)
	}
	there()
	if name := managertest.Must(s.DefaultContext(t.Context(), "node"))(t); name != "default-node" {
		t.Errorf("%q", name)
	}
}

// TestUseOfAnother: the token of a sandbox is for that one, whatever has its name.
func TestUseOfAnother(t *testing.T) {
	one, _, made := claimed(t)
	for id, want := range map[sandbox.ID]bool{made.ID: true, sandbox.NewID(): false} {
		ctx, cancel := server.WithPrincipal(t.Context(), access.Principal{Role: access.RoleSandbox, Sandbox: id})
		defer cancel()
		s, err := one.Use(ctx, made.Key)
		if err == nil {
			s.Close()
		}
		if _, looked := one.Sandbox(ctx, made.Key); (looked == nil) != want {
			t.Errorf("looking at %s: %v", id, looked)
		}
		if (err == nil) != want || err != nil && !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("%s: %v", id, err)
		}
	}
}
