package node

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal/sealtest"
)

// hiding is an error that admins read otherwise than tenants.
type hiding struct{}

func (hiding) Error() string     { return "the registry cannot be reached" }
func (hiding) ForAdmins() string { return "connection refused by 10.1.2.3" }

// asking is a builder that asks for the credentials of its namespace, and fails.
type asking struct {
	builder
	mu  sync.Mutex // protects got
	got []string
}

func (b *asking) Build(_ context.Context, req BuildRequest) (sandbox.Built, error) {
	user, password, ok := req.Credentials("registry.example.com")
	b.mu.Lock()
	defer b.mu.Unlock()
	b.got = append(b.got, fmt.Sprint(req.Namespace, " ", user, " ", password, " ", ok))
	return sandbox.Built{}, fmt.Errorf("image x: %w", hiding{})
}

// TestRegistryLogins: builds get the credentials of their namespace, and the next daemon has
// them, too. They are sealed on disk, and never in the log. Details that a failed build
// leaves out of its problem are for admins.
func TestRegistryLogins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, h, b := t.TempDir(), nodetest.NewHost(t), &asking{}
		var log bytes.Buffer
		open := func() *Manager {
			return daemon(t, dir, h, func(c *Config) { c.Builder, c.Log = b, slog.New(slog.NewTextHandler(&log, nil)) })
		}
		m := open()
		defer func() { _ = m.Close() }()
		login := func(n sandbox.Namespace, password sandbox.Password) {
			t.Helper()
			must(t, second(m.SetRegistryLogin(t.Context(), n, "registry.example.com", sandbox.RegistryCredentials{Username: "u-" + string(n), Password: password})))
		}
		login(sandbox.DefaultNamespace, canary)
		login("third", "of another")
		must(t, m.Close())
		m = open()
		spec := sandbox.TemplateSpec{Image: "x", MilliCPUs: 1000, Memory: 64 * mib}
		must(t, second(m.ApplyTemplate(t.Context(), key("a"), spec)), second(m.ApplyTemplate(t.Context(), other("a"), spec)))
		synctest.Wait()
		if got := fmt.Sprint(b.got); len(b.got) != 2 || !strings.Contains(got, "default u-default "+canary+" true") || !strings.Contains(got, "other   false") {
			t.Errorf("builds have %q", b.got)
		}
		built, err := m.Template(t.Context(), key("a"))
		must(t, err)
		for who, c := range map[string]struct {
			ctx   context.Context
			cause string
		}{"a tenant": {t.Context(), ""}, "an admin": {sandbox.WithAdministering(t.Context()), "connection refused by 10.1.2.3"}} {
			builds, err := m.Builds(c.ctx, built)
			if err != nil || len(builds) != 1 || builds[0].Cause != c.cause || builds[0].Problem != "image x: the registry cannot be reached" {
				t.Errorf("%s reads %+v, %v", who, builds, err)
			}
		}
		var text strings.Builder
		must(t, m.CopyBuildLog(t.Context(), sandbox.BuildLogRequest{Key: key("a"), Stage: sandbox.AfterReady}, &text))
		if strings.Contains(text.String(), "10.1.2.3") || !strings.Contains(log.String(), "connection refused by 10.1.2.3") {
			t.Errorf("the build's log: %s\nthe daemon's: %s", text.String(), log.String())
		}
		for i := range sandbox.MaxRegistryLogins {
			host := sandbox.RegistryHost(fmt.Sprintf("r%d.example.com", i))
			_, err := m.SetRegistryLogin(t.Context(), sandbox.DefaultNamespace, host, sandbox.RegistryCredentials{Username: "u", Password: "p"})
			if refused := i == sandbox.MaxRegistryLogins-1; (err != nil) != refused {
				t.Errorf("registry %d: %v", i, err)
			}
		}
		if shown := fmt.Sprintf("%v %+v %#v", m.logins.of(sandbox.DefaultNamespace), m.logins.of(sandbox.DefaultNamespace), sandbox.RegistryCredentials{Password: canary}); strings.Contains(shown, canary) {
			t.Errorf("shown: %s", shown)
		}
		must(t, m.Close())
		if found := sealtest.FilesWith(t, dir, canary); found != nil || strings.Contains(log.String(), canary) {
			t.Errorf("in the clear in %v, or in the log", found)
		}
	})
}

// TestLoginsWithoutKey: a daemon without a key takes no credentials, and one without a store
// of images says so.
func TestLoginsWithoutKey(t *testing.T) {
	m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Key = nil })
	defer func() { _ = m.Close() }()
	_, err := m.SetRegistryLogin(t.Context(), "a", "registry.example.com", sandbox.RegistryCredentials{Username: "u", Password: "p"})
	if !sandbox.HasCode(err, sandbox.CodeUnimplemented) {
		t.Error(err)
	}
	if _, err := m.Images(t.Context(), "a", sandbox.Page{}); !sandbox.HasCode(err, sandbox.CodeUnimplemented) {
		t.Error(err)
	}
}

// fewImages is a store of images that gives as many as it is asked for.
type fewImages struct{ ImageStore }

func (fewImages) Digests(most int) ([]string, error) { return make([]string, most), nil }

// TestNodeNamesImages: a node's status names the images on the node, of which there are not too
// many for a message.
func TestNodeNamesImages(t *testing.T) {
	m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Images = fewImages{} })
	defer func() { must(t, m.Close()) }()
	n, err := m.Node(t.Context())
	if err != nil || len(n.Images) != shownImages {
		t.Errorf("%d images, %v", len(n.Images), err)
	}
}
