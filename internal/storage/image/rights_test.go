package image

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/network/addresses"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// oneHost is a host whose own addresses are those listed.
type oneHost []string

func (h oneHost) Owns(a netip.Addr) (bool, string, error) {
	return slices.Contains(h, a.String()), "an address of the host", nil
}

// tenantOf has a namespace, with credentials for every registry if user is not empty.
func tenantOf(namespace, user string) *Tenant {
	return &Tenant{
		Namespace: namespace, Guard: addresses.NewGuard(oneHost{"93.184.216.34"}, nil),
		Credentials: func(string) (string, string, bool) { return user, "secret", user != "" },
	}
}

// tenant are the options of a pull for a namespace from this registry, which is named.
func (r *testRegistry) tenant(t *testing.T, namespace, user string) PullOptions {
	t.Helper()
	named := Registry{PlainHTTP: r.certificate == nil}
	if r.certificate != nil {
		named.CAFile = r.caFile(t)
	}
	return PullOptions{Registries: Registries{Hosts: map[string]Registry{r.host: named}}, Tenant: tenantOf(namespace, user)}
}

func (r *testRegistry) wantUser(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.user = name
}

func small(t *testing.T, text string) v1.Image {
	t.Helper()
	return imageOf(t, v1.Config{}, layerOf(t, tarOf(t, map[string]string{"file": text})))
}

func wantNotHere(t *testing.T, s *Store, namespace string, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if img, err := s.ResolveIn(namespace, text); !errors.Is(err, ErrNotFound) {
			t.Errorf("namespace %s finds %s: %+v, %v", namespace, text, img, err)
		}
	}
}

// TestRights: only the namespace that pulled an image has it. Others find it neither by its
// name nor by its digest. They get it from its repository if that lets them; another
// repository has to send all of it.
func TestRights(t *testing.T) {
	r, evil, s := newRegistry(t, withTLS), newRegistry(t, withTLS), newStore(t)
	img := small(t, "private")
	ref := r.push(t, "team/app:1", img)
	r.wantUser("alice")
	d := digestOf(t, img)
	byDigest := r.host + "/team/app@" + string(d)
	if _, err := s.Pull(t.Context(), ref, r.tenant(t, "a", "alice")); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{ref.String(), string(d), d.Short()} {
		if got, err := s.ResolveIn("a", text); err != nil || got.Digest != d || !slices.Equal(got.Names, []string{ref.String()}) {
			t.Errorf("a finds %s: %+v, %v", text, got, err)
		}
	}
	refused := func(what, text, namespace, user string, from *testRegistry) {
		t.Helper()
		if got, err := s.Pull(t.Context(), mustRef(t, text), from.tenant(t, namespace, user)); err == nil {
			t.Errorf("%s: %s has got %s", what, namespace, got.Digest)
		}
		wantNotHere(t, s, namespace, text, ref.String(), string(d), d.Short())
	}
	wantNotHere(t, s, "b", ref.String(), byDigest, string(d), d.Short())
	refused("the tag without credentials", ref.String(), "b", "", r)
	refused("the digest without credentials", byDigest, "b", "", r)
	refused("credentials of another", byDigest, "b", "bob", r)

	// A registry of the tenant's has the manifest and the configuration, and not the layer.
	copied := evil.push(t, "mine/copy:1", img)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	answer := func(code int, body string) func(w http.ResponseWriter, req *http.Request) bool {
		return func(w http.ResponseWriter, req *http.Request) bool {
			if !strings.HasSuffix(req.URL.Path, digest.String()) {
				return false
			}
			w.WriteHeader(code)
			_, _ = w.Write([]byte(body))
			return true
		}
	}
	evil.set(answer(http.StatusNotFound, ""))
	refused("a manifest without layers", copied.String(), "b", "", evil)
	evil.set(answer(http.StatusOK, "something else"))
	refused("other layers", evil.host+"/mine/copy@"+string(d), "b", "", evil)

	// Being published proves nothing for later.
	if _, err := s.Publish(t.Context(), "a", ref.String()); err != nil {
		t.Fatal(err)
	}
	if got, err := s.ResolveIn("b", ref.String()); err != nil || got.Digest != d {
		t.Errorf("b finds what is published: %+v, %v", got, err)
	}
	if _, err := s.Pull(t.Context(), copied, evil.tenant(t, "b", "")); err == nil {
		t.Error("b has got a name for what it could not show")
	}
	if got, err := s.Unpublish(t.Context(), ref.String()); err != nil || got != d {
		t.Fatalf("%s, %v", got, err)
	}
	refused("a manifest without layers, of what was published", copied.String(), "b", "", evil)

	// The repository that it came from answers for its users; another has to send it all.
	before := r.blobGets()
	if got, err := s.Pull(t.Context(), ref, r.tenant(t, "b", "alice")); err != nil || got.Digest != d {
		t.Errorf("b with credentials: %+v, %v", got, err)
	}
	if n := r.blobGets() - before; n > 1 {
		t.Errorf("%d blobs were fetched again", n)
	}
	evil.set(nil)
	before = evil.blobGets()
	if got, err := s.Pull(t.Context(), copied, evil.tenant(t, "c", "")); err != nil || got.Digest != d {
		t.Errorf("c with the content: %+v, %v", got, err)
	}
	if n := evil.blobGets() - before; n != 2 {
		t.Errorf("c has sent %d blobs, not the configuration and the layer", n)
	}
	if got, err := s.ResolveIn("c", copied.String()); err != nil || got.Digest != d {
		t.Errorf("%+v, %v", got, err)
	}
	wantNotHere(t, s, "c", ref.String())
	wantNotHere(t, s, "d", ref.String(), string(d))
	wantTidy(t, s)
}

// TestNamesOfNamespaces: a name means what it means in its namespace, then what it is
// published as; and one namespace's is none of another's.
func TestNamesOfNamespaces(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	one, two := small(t, "one"), small(t, "two")
	ref := r.push(t, "app:1", one)
	if _, err := s.Pull(t.Context(), ref, r.tenant(t, "a", "")); err != nil {
		t.Fatal(err)
	}
	r.push(t, "app:1", two)
	if _, err := s.Pull(t.Context(), ref, r.options(t)); err != nil { // by root
		t.Fatal(err)
	}
	for namespace, want := range map[string]Digest{"a": digestOf(t, one), "b": digestOf(t, two)} {
		if got, err := s.ResolveIn(namespace, ref.String()); err != nil || got.Digest != want {
			t.Errorf("in %s it is %+v, %v", namespace, got, err)
		}
	}
	if got, err := s.Resolve(ref.String()); err != nil || got.Digest != digestOf(t, two) {
		t.Errorf("for root it is %+v, %v", got, err)
	}
	if list, err := s.ListIn("b", "", 100); err != nil || len(list) != 1 || !list[0].Published || list[0].Digest != digestOf(t, two) {
		t.Errorf("b sees %+v, %v", list, err)
	}
	if list, err := s.ListIn("a", "", 100); err != nil || len(list) != 2 {
		t.Errorf("a sees %+v, %v", list, err)
	}
}

// TestPublishAs: an admin publishes by any name, or by a digest, and unpublishes one name
// or all.
func TestPublishAs(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	ref := r.push(t, "app:1", small(t, "one"))
	pulled, err := s.Pull(t.Context(), ref, r.tenant(t, "a", ""))
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{ref.String(), "app:none", "sha256:" + strings.Repeat("0", 64)} {
		if _, err := s.Publish(t.Context(), "b", text); !errors.Is(err, ErrNotFound) {
			t.Errorf("publish %s as b's: %v", text, err)
		}
	}
	img, err := s.Publish(t.Context(), "b", string(pulled.Digest), mustRef(t, "everyone:1"), mustRef(t, "everyone:2"))
	if err != nil || !slices.Equal(img.Names, []string{"index.docker.io/library/everyone:1", "index.docker.io/library/everyone:2"}) {
		t.Fatalf("%+v, %v", img, err)
	}
	if _, err := s.Unpublish(t.Context(), "everyone:1"); err != nil {
		t.Fatal(err)
	}
	wantNotHere(t, s, "c", "everyone:1", ref.String())
	if _, err := s.ResolveIn("c", "everyone:2"); err != nil {
		t.Error(err)
	}
	if _, err := s.Unpublish(t.Context(), string(pulled.Digest)); err != nil {
		t.Fatal(err)
	}
	wantNotHere(t, s, "c", "everyone:2", string(pulled.Digest))
	if _, err := s.ResolveIn("a", ref.String()); err != nil {
		t.Errorf("the namespace has lost what it has pulled: %v", err)
	}
	if _, err := s.Unpublish(t.Context(), string(pulled.Digest)); !errors.Is(err, ErrNotFound) {
		t.Errorf("unpublished twice: %v", err)
	}
}

// TestRemoveIn: an image goes with its last name, unless it is published.
func TestRemoveIn(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	ref := r.push(t, "app:1", small(t, "one"))
	pull := func(namespace string) Digest {
		t.Helper()
		img, err := s.Pull(t.Context(), ref, r.tenant(t, namespace, ""))
		if err != nil {
			t.Fatal(err)
		}
		return img.Digest
	}
	remove := func(namespace string) {
		t.Helper()
		if err := s.RemoveIn(t.Context(), namespace, ref.String()); err != nil {
			t.Fatal(err)
		}
	}
	here := func(d Digest, want bool) {
		t.Helper()
		if _, err := s.Resolve(string(d)); (err == nil) != want {
			t.Errorf("here: %v, want %v", err, want)
		}
	}
	d := pull("a")
	pull("b")
	remove("a")
	here(d, true)
	wantNotHere(t, s, "a", ref.String(), string(d))
	if p, err := s.Prune(t.Context(), false); err != nil || len(p.Images) != 0 {
		t.Errorf("b's image was pruned: %+v, %v", p, err)
	}
	h, err := s.Open(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveIn(t.Context(), "b", ref.String()); !errors.Is(err, ErrInUse) {
		t.Errorf("removed in use: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	remove("b")
	here(d, false)
	if err := s.RemoveIn(t.Context(), "b", ref.String()); !errors.Is(err, ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
	// Nothing of it is left: one that comes later by its digest is nobody's.
	pull("a")
	wantNotHere(t, s, "b", ref.String(), string(d))
	if _, err := s.Publish(t.Context(), "a", ref.String()); err != nil {
		t.Fatal(err)
	}
	remove("a")
	here(d, true)
	if _, err := s.Remove(t.Context(), string(d)); err != nil {
		t.Fatal(err)
	}
	pull("b")
	wantNotHere(t, s, "a", ref.String(), string(d))
	wantTidy(t, s)
}

// TestRightsOfOldStore: images of an AgentRun without rights are published, with and
// without names. Later images are not.
func TestRightsOfOldStore(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	old := r.push(t, "old:1", small(t, "old"))
	img, err := s.Pull(t.Context(), old, r.options(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{rightsName, namesName} { // it lost its name, too
		if err := os.Remove(s.path(file)); err != nil {
			t.Fatal(err)
		}
	}
	if s, err = OpenStore(s.dir); err != nil {
		t.Fatal(err)
	}
	if got, err := s.ResolveIn("a", string(img.Digest)); err != nil || got.Digest != img.Digest {
		t.Errorf("%+v, %v", got, err)
	}
	later, err := s.Pull(t.Context(), r.push(t, "later:1", small(t, "later")), r.tenant(t, "a", ""))
	if err != nil {
		t.Fatal(err)
	}
	if s, err = OpenStore(s.dir); err != nil {
		t.Fatal(err)
	}
	wantNotHere(t, s, "b", string(later.Digest))
}

// TestStaleRights: the rights to an image that was removed by hand do not apply to one
// that comes with the same digest.
func TestStaleRights(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	ref := r.push(t, "app:1", small(t, "one"))
	img, err := s.Pull(t.Context(), ref, r.options(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.RemoveAll(s.rootDir(img.Digest)), os.Remove(s.path(namesName))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pull(t.Context(), ref, r.tenant(t, "a", "")); err != nil {
		t.Fatal(err)
	}
	wantNotHere(t, s, "b", string(img.Digest))
}

// FuzzRights: a file of rights is refused, or writing it again gives the same
// rights.
func FuzzRights(f *testing.F) {
	f.Add([]byte(`{"schema": 1, "images": {}, "namespaces": {"a": {"x": "sha256:` + strings.Repeat("0", 64) + `"}}}`))
	f.Add([]byte(`{"schema": 1, "images": null, "namespaces": null}`))
	f.Add([]byte(`{"schema": 2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRights(b)
		if err != nil {
			return
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeRights(again); err != nil {
			t.Errorf("%s: %v", again, err)
		}
		r.give("n", "sha256:x", nil) // does not panic
		r.cameFrom("sha256:x", "r")
	})
}
