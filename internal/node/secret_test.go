package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/node/nodetest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal"
	"agentrun.dev/internal/storage/seal/sealtest"
	"agentrun.dev/internal/storage/snapshot"
)

const canary = "sk-live-canary-0123456789"

func as(t *testing.T, who sandbox.Principal) context.Context {
	return sandbox.WithPrincipal(t.Context(), who)
}

// claimHolder makes a sandbox that holds a secret of alice.
func claimHolder(t *testing.T, m *Manager, name string) sandbox.Sandbox {
	t.Helper()
	if _, err := m.ApplySecret(t.Context(), key("llm"), sandbox.SecretData{"API_KEY": []byte(canary), "b": []byte("x")}); err != nil {
		t.Fatal(err)
	}
	s, _, err := m.Claim(as(t, "alice"), sandbox.ClaimRequest{Key: key(name), Spec: sandbox.ClaimSpec{Pool: "pool", Env: sandbox.Env{"PLAIN": "p"}, Secrets: []sandbox.SecretRef{{Secret: "llm", Key: "API_KEY"}}}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSecrets: made, changed, listed without values, deleted, and there again
// after a restart.
func TestSecrets(t *testing.T) {
	dir, h := t.TempDir(), nodetest.NewHost(t)
	m := daemon(t, dir, h)
	defer func() { _ = m.Close() }()
	made, err := m.ApplySecret(t.Context(), key("llm"), sandbox.SecretData{"b": []byte(canary), "A": []byte("1")})
	if err != nil || !slices.Equal(made.Keys, []string{"A", "b"}) {
		t.Fatalf("%+v, %v", made, err)
	}
	set, err := m.SetSecret(t.Context(), key("llm"), sandbox.SecretData{"c": []byte("")})
	if err != nil || !slices.Equal(set.Keys, []string{"A", "b", "c"}) || !set.Created.Equal(made.Created) {
		t.Errorf("%+v, %v", set, err)
	}
	if _, err := m.SetSecret(t.Context(), sandbox.Key{Namespace: "other", Name: "llm"}, sandbox.SecretData{"X": []byte(canary)}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		list, err := m.Secrets(t.Context(), sandbox.DefaultNamespace, sandbox.Page{})
		if err != nil || len(list) != 1 || !slices.Equal(list[0].Keys, set.Keys) {
			t.Errorf("%+v, %v", list, err)
		}
		if list, err := m.Secrets(t.Context(), "other", sandbox.Page{}); err != nil || len(list) != 1 {
			t.Errorf("%+v, %v", list, err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		if found := sealtest.FilesWith(t, dir, canary); found != nil {
			t.Errorf("in the clear in %v", found)
		}
		m = daemon(t, dir, h)
	}
	env, err := m.secretEnv(sandbox.DefaultNamespace, []sandbox.SecretRef{{Secret: "llm", Key: "b", Env: "B"}, {Secret: "llm", Key: "c"}})
	if err != nil || env["B"] != canary || len(env) != 2 || env["c"] != "" {
		t.Errorf("%d variables, %v", len(env), err)
	}
	if s, err := m.ApplySecret(t.Context(), key("llm"), sandbox.SecretData{"only": []byte("1")}); err != nil || !slices.Equal(s.Keys, []string{"only"}) {
		t.Errorf("%+v, %v", s, err)
	}
	if err := m.DeleteSecret(t.Context(), key("llm")); err != nil {
		t.Fatal(err)
	}
	if err := m.DeleteSecret(t.Context(), key("llm")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
		t.Errorf("deleted twice: %v", err)
	}
	if _, err := m.Secret(t.Context(), key("llm")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
		t.Errorf("it is still there: %v", err)
	}
	for name, bad := range map[string]sandbox.SecretData{
		"nothing": {}, "no name": {"": []byte("x")}, "a space": {"a b": []byte(canary)}, "a path": {"../x": []byte(canary)},
		"a NUL": {"k": []byte(canary + "\x00")}, "large": {"k": bytes.Repeat([]byte(canary), 2000)},
	} {
		if _, err := m.SetSecret(t.Context(), key("bad"), bad); !sandbox.HasCode(err, sandbox.CodeInvalid) || strings.Contains(err.Error(), canary) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSecretStoreRefuses what it did not write: another key, files that were
// changed or swapped.
func TestSecretStoreRefuses(t *testing.T) {
	dir, h := t.TempDir(), nodetest.NewHost(t)
	m := daemon(t, dir, h)
	for _, name := range []string{"one", "two"} {
		if _, err := m.ApplySecret(t.Context(), key(name), sandbox.SecretData{"K": []byte(canary)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	secrets := SecretsFolder(dir)
	open := func(k *seal.Key) error {
		_, err := openSecrets(secrets, k)
		if err != nil && strings.Contains(err.Error(), canary) {
			t.Errorf("the error shows it: %v", err)
		}
		return err
	}
	another, err := seal.Generate()
	if err != nil {
		t.Fatal(err)
	}
	if err := open(another); !errors.Is(err, seal.ErrKey) {
		t.Errorf("with another key: %v", err)
	}
	// A writer that was killed has changed nothing.
	if err := os.WriteFile(filepath.Join(secrets, tempSecret+"1"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := open(testKey()); err != nil {
		t.Error(err)
	}
	if list, err := os.ReadDir(secrets); err != nil || len(list) != 3 {
		t.Errorf("%v, %v", list, err)
	}
	one := filepath.Join(secrets, secretFile(key("one")))
	good, err := os.ReadFile(one)
	if err != nil {
		t.Fatal(err)
	}
	two, err := os.ReadFile(filepath.Join(secrets, secretFile(key("two"))))
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string][]byte{"swapped": two, "cut off": good[:len(good)-1], "empty": nil} {
		if err := os.WriteFile(one, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if open(testKey()) == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
}

// TestHolder: a claim's agent has the values, the journal has references, and
// images are sealed. The supplier of the secrets may fork, others may not.
func TestHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		dir, h := t.TempDir(), nodetest.NewHost(t)
		m := daemon(t, dir, h, func(c *Config) { c.Log = slog.New(slog.NewJSONHandler(&log, nil)) })
		defer func() { _ = m.Close() }()
		setUp(t, m, 1)
		s := claimHolder(t, m, "a")
		want := []sandbox.SecretRef{{Secret: "llm", Key: "API_KEY"}}
		if !slices.Equal(s.Secrets, want) || s.SecretsBy != "alice" || s.Env["API_KEY"] != "" || s.Env["PLAIN"] != "p" {
			t.Errorf("claimed %+v", s)
		}
		if text, err := json.Marshal(s); err != nil || strings.Contains(string(text), canary) {
			t.Errorf("%s, %v", text, err)
		}
		claim(t, m, "plain", sandbox.Lifetime{})

		for _, who := range []sandbox.Principal{"bob", ""} {
			_, _, err := m.Fork(as(t, who), sandbox.ForkRequest{Key: key("theft"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})
			if !sandbox.HasCode(err, sandbox.CodeDenied) || !strings.Contains(err.Error(), "alice") {
				t.Errorf("a fork by %q: %v", who, err)
			}
			if _, err := m.ForkOf(t.Context(), key("theft")); !sandbox.HasCode(err, sandbox.CodeNotFound) {
				t.Errorf("the fork is there: %v", err)
			}
		}
		f, _, err := m.Fork(as(t, "alice"), sandbox.ForkRequest{Key: key("f"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}})
		if err != nil || !f.HoldsSecrets || f.By != "alice" {
			t.Fatalf("%+v, %v", f, err)
		}
		if got := strings.Count(log.String(), `"holdsSecrets":true`); got != 3 {
			t.Errorf("%d forks are in the log:\n%s", got, log.String())
		}
		// So does a fork of the fork.
		if _, _, err := m.Fork(as(t, "bob"), sandbox.ForkRequest{Key: key("g"), Spec: sandbox.ForkSpec{Source: "f-1", Replicas: 1}}); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("a fork of the child: %v", err)
		}
		if g, _, err := m.Fork(as(t, "bob"), sandbox.ForkRequest{Key: key("h"), Spec: sandbox.ForkSpec{Source: "plain", Replicas: 1}}); err != nil || g.HoldsSecrets {
			t.Errorf("a fork of one without secrets: %+v, %v", g, err)
		}
		for name, private := range map[string]bool{"a": true, "f-1": true, "plain": false} {
			asleep, err := m.Hibernate(t.Context(), key(name))
			if err != nil {
				t.Fatal(err)
			}
			image, err := snapshot.ReadManifest(m.asleepDir(asleep.Asleep))
			if err != nil || image.Private != private {
				t.Errorf("the image of %s is private: %v, %v", name, image.Private, err)
			}
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		m = daemon(t, dir, h)
		if s := wantState(t, m, "a", sandbox.Hibernated); !slices.Equal(s.Secrets, want) || s.SecretsBy != "alice" {
			t.Errorf("after a restart: %+v", s)
		}
		for _, name := range []string{"a", "f-1", "plain"} {
			if s, err := m.Resume(t.Context(), key(name)); err != nil || s.State != sandbox.Running {
				t.Errorf("%s: %q, %v", name, s.State, err)
			}
		}
		if _, _, err := m.Fork(as(t, "bob"), sandbox.ForkRequest{Key: key("theft"), Spec: sandbox.ForkSpec{Source: "a", Replicas: 1}}); !sandbox.HasCode(err, sandbox.CodeDenied) {
			t.Errorf("after a restart: %v", err)
		}
		if found := sealtest.FilesWith(t, dir, canary); found != nil || strings.Contains(log.String(), canary) {
			t.Errorf("in the clear in %v, or in the log", found)
		}
	})
}

// TestHolderExec: programs in the sandbox have the value, also after a restart
// of the daemon and after the secret was deleted.
func TestHolderExec(t *testing.T) {
	dir, h := t.TempDir(), nodetest.NewHost(t)
	h.Execs = true
	m := daemon(t, dir, h)
	defer func() { _ = m.Close() }()
	if _, err := m.ApplyTemplate(t.Context(), key("python"), sandbox.TemplateSpec{Image: "one", MilliCPUs: 1000, Memory: 64 * mib}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.ApplyPool(t.Context(), key("pool"), sandbox.PoolSpec{Template: "python", Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.WaitPool(t.Context(), key("pool")); err != nil {
		t.Fatal(err)
	}
	claimHolder(t, m, "a")
	check := func() {
		t.Helper()
		u, err := m.Use(t.Context(), key("a"))
		if err != nil {
			t.Fatal(err)
		}
		defer u.Close()
		var out bytes.Buffer
		req := guestrpc.ExecRequest{Argv: []string{"/bin/sh", "-c", "echo $API_KEY $PLAIN"}, Workdir: "/"}
		if _, err := u.Agent().Run(t.Context(), req, nil, &out, io.Discard); err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimSpace(out.String()); got != canary+" p" {
			t.Errorf("the program has %q", got)
		}
	}
	check()
	if err := m.DeleteSecret(t.Context(), key("llm")); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	m = daemon(t, dir, h)
	check()
}

// TestClaimRefuses: a claim that asks for what is not there leaves nothing.
func TestClaimRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := nodetest.NewHost(t)
		m := daemon(t, t.TempDir(), h)
		defer func() { _ = m.Close() }()
		setUp(t, m, 1)
		big := sandbox.SecretData{}
		for i := range 2 {
			big[fmt.Sprintf("K%d", i)] = bytes.Repeat([]byte("x"), sandbox.MaxSecretValue)
		}
		for name, data := range map[string]sandbox.SecretData{"s": {"K": []byte(canary), "dash-ed": []byte(canary)}, "big": big} {
			if _, err := m.ApplySecret(t.Context(), key(name), data); err != nil {
				t.Fatal(err)
			}
		}
		for name, c := range map[string]struct {
			spec sandbox.ClaimSpec
			code sandbox.Code
		}{
			"no secret":   {sandbox.ClaimSpec{Secrets: []sandbox.SecretRef{{Secret: "none", Key: "K"}}}, sandbox.CodeNotFound},
			"no key":      {sandbox.ClaimSpec{Secrets: []sandbox.SecretRef{{Secret: "s", Key: "L"}}}, sandbox.CodeNotFound},
			"no variable": {sandbox.ClaimSpec{Secrets: []sandbox.SecretRef{{Secret: "s", Key: "dash-ed"}}}, sandbox.CodeInvalid},
			"bad name":    {sandbox.ClaimSpec{Secrets: []sandbox.SecretRef{{Secret: "../s", Key: "K"}}}, sandbox.CodeInvalid},
			"bad env":     {sandbox.ClaimSpec{Secrets: []sandbox.SecretRef{{Secret: "s", Key: "K", Env: "A=B"}}}, sandbox.CodeInvalid},
			"twice":       {sandbox.ClaimSpec{Secrets: []sandbox.SecretRef{{Secret: "s", Key: "K"}, {Secret: "s", Key: "K"}}}, sandbox.CodeInvalid},
			"in env too":  {sandbox.ClaimSpec{Env: sandbox.Env{"K": "v"}, Secrets: []sandbox.SecretRef{{Secret: "s", Key: "K"}}}, sandbox.CodeInvalid},
			"too large":   {sandbox.ClaimSpec{Secrets: []sandbox.SecretRef{{Secret: "big", Key: "K0"}, {Secret: "big", Key: "K1"}}}, sandbox.CodeInvalid},
			"too many":    {sandbox.ClaimSpec{Secrets: slices.Repeat([]sandbox.SecretRef{{Secret: "s", Key: "K"}}, sandbox.MaxSecretRefs+1)}, sandbox.CodeInvalid},
		} {
			c.spec.Pool = "pool"
			if _, _, err := m.Claim(as(t, "alice"), sandbox.ClaimRequest{Key: key("x"), Spec: c.spec}); !sandbox.HasCode(err, c.code) || strings.Contains(err.Error(), canary) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, _, err := m.Claim(as(t, "alice"), sandbox.ClaimRequest{Key: sandbox.Key{Namespace: "other", Name: "x"}, Spec: sandbox.ClaimSpec{Pool: "pool"}}); !sandbox.HasCode(err, sandbox.CodeNotFound) {
			t.Errorf("in another namespace: %v", err)
		}
		if list, err := m.Sandboxes(t.Context(), sandbox.SandboxesRequest{Namespace: sandbox.DefaultNamespace, Page: sandbox.Page{}, Ended: true}); err != nil || len(list) != 0 {
			t.Errorf("left: %v, %v", list, err)
		}
		for _, shown := range []string{fmt.Sprintf("%v %+v %#v", big, sandbox.SecretData{"k": []byte(canary)}, sandbox.SecretData{"k": []byte(canary)}), fmt.Sprintf("%+v %#v", m.secrets.get(key("s")), m.secrets.get(key("s")))} {
			if strings.Contains(shown, canary) || strings.Contains(shown, "115 107") {
				t.Errorf("shown: %s", shown)
			}
		}
		if _, err := json.Marshal(sandbox.SecretData{"k": []byte(canary)}); err == nil {
			t.Error("values became JSON")
		}
	})
}

// TestNoKey: a daemon without a key takes no secrets.
func TestNoKey(t *testing.T) {
	m := daemon(t, t.TempDir(), nodetest.NewHost(t), func(c *Config) { c.Key = nil })
	defer func() { _ = m.Close() }()
	if _, err := m.ApplySecret(t.Context(), key("s"), sandbox.SecretData{"K": []byte("v")}); !sandbox.HasCode(err, sandbox.CodeUnimplemented) {
		t.Error(err)
	}
}
