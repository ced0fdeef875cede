package template

import (
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/network/addresses"
	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/image"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// guarded is a registry on loopback that only alice may use, and a builder of a node whose
// settings name it.
func guarded(t *testing.T) (*Builder, string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may unpack images")
	}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); r.Method == http.MethodGet && (user != "alice" || password != "secret") && r.Header.Get("X-Test") == "" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	host := server.Listener.Addr().String()
	ref, err := name.ParseReference(host+"/team/app:1", name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: "amd64"})
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img, remote.WithTransport(asTest{})); err != nil {
		t.Fatal(err)
	}
	store, err := image.OpenStore(filepath.Join(t.TempDir(), "images"))
	if err != nil {
		t.Fatal(err)
	}
	return &Builder{
		Images: store, Guard: addresses.NewGuard(elsewhere{}, nil),
		Pull: image.PullOptions{Registries: image.Registries{Hosts: map[string]image.Registry{host: {PlainHTTP: true}}}},
	}, host + "/team/app:1"
}

// asTest passes the registry's authentication.
type asTest struct{}

func (asTest) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("X-Test", "1")
	return http.DefaultTransport.RoundTrip(r)
}

type elsewhere struct{}

func (elsewhere) Owns(netip.Addr) (bool, string, error) { return false, "", nil }

// find has a builder find an image for a namespace, and says whether it was pulled.
func find(t *testing.T, b *Builder, n sandbox.Namespace, text, user string) (digest string, pulled bool, err error) {
	t.Helper()
	h, img, err := b.find(t.Context(), node.BuildRequest{
		Namespace: n, Spec: sandbox.TemplateSpec{Image: text}, Log: io.Discard, Pull: func() error { pulled = true; return nil },
		Credentials: func(string) (string, string, bool) { return user, "secret", user != "" },
	})
	if err != nil {
		return "", pulled, err
	}
	return string(img.Digest), pulled, h.Close()
}

// TestImagesOfNamespaces: a build has its namespace's image, a published one, or one that it
// pulls with the namespace's credentials; and an image goes with its last namespace.
func TestImagesOfNamespaces(t *testing.T) {
	b, name := guarded(t)
	images := Images{b.Images}
	if _, _, err := find(t, b, "a", name, ""); err == nil || errors.Is(err, node.ErrInterrupted) || !strings.Contains(err.Error(), "answers 401") {
		t.Errorf("without credentials: %v", err)
	}
	digest, pulled, err := find(t, b, "a", name, "alice")
	if err != nil || !pulled {
		t.Fatalf("%v, %v", pulled, err)
	}
	for most, want := range map[int]int{0: 0, 1: 1, 2: 1} {
		if got, err := images.Digests(most); err != nil || len(got) != want || want > 0 && got[0] != digest {
			t.Errorf("of %d images: %v, %v", most, got, err)
		}
	}
	if again, pulled, err := find(t, b, "a", name, ""); err != nil || pulled || again != digest {
		t.Errorf("again: %s, %v, %v", again, pulled, err)
	}
	if _, pulled, err := find(t, b, "b", name, ""); err == nil || !pulled {
		t.Errorf("another namespace: %v", err)
	}
	if _, pulled, err := find(t, b, "b", digest, "alice"); !errors.Is(err, image.ErrNotFound) || pulled {
		t.Errorf("another namespace, by digest: %v", err)
	}
	if list, err := images.Images("b", sandbox.Page{}); err != nil || len(list) != 0 {
		t.Errorf("another namespace sees %+v, %v", list, err)
	}

	shown, err := images.Publish(t.Context(), sandbox.PublishRequest{Namespace: "a", Image: name, Names: []string{"app:1"}})
	if err != nil || shown.Digest != digest || !shown.Published || shown.Size == 0 {
		t.Fatalf("%+v, %v", shown, err)
	}
	for _, text := range []string{"app:1", digest} {
		if got, pulled, err := find(t, b, "b", text, ""); err != nil || pulled || got != digest {
			t.Errorf("published, as %s: %s, %v, %v", text, got, pulled, err)
		}
	}
	if list, err := images.Images("b", sandbox.Page{}); err != nil || len(list) != 1 || len(list[0].Names) != 1 {
		t.Errorf("the other namespace sees %+v, %v", list, err)
	}
	if err := images.Unpublish(t.Context(), "app:1"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := find(t, b, "b", digest, ""); !errors.Is(err, image.ErrNotFound) {
		t.Errorf("after it was unpublished: %v", err)
	}
	if err := images.Unpublish(t.Context(), "app:1"); !sandbox.HasCode(err, sandbox.CodeNotFound) {
		t.Errorf("unpublished twice: %v", err)
	}

	if got, pulled, err := find(t, b, "b", name, "alice"); err != nil || !pulled || got != digest {
		t.Errorf("with credentials: %s, %v, %v", got, pulled, err)
	}
	for _, n := range []sandbox.Namespace{"a", "b"} {
		if _, err := b.Images.Resolve(digest); err != nil {
			t.Errorf("before %s has dropped it: %v", n, err)
		}
		if gone, err := b.DropImage(t.Context(), n, name); err != nil || !gone {
			t.Errorf("%v, %v", gone, err)
		}
	}
	if _, err := b.Images.Resolve(digest); !errors.Is(err, image.ErrNotFound) {
		t.Errorf("its last namespace has dropped it: %v", err)
	}
	if gone, err := b.DropImage(t.Context(), "a", name); err != nil || !gone {
		t.Errorf("dropped twice: %v, %v", gone, err)
	}
}

// TestUnreachableRegistry: a registry that does not answer is tried again, for any
// reason. Only the cause for admins tells the reason.
func TestUnreachableRegistry(t *testing.T) {
	b, _ := guarded(t)
	texts := map[string]bool{}
	for host, cause := range map[string]string{"127.0.0.1:1": "loopback", "10.1.2.3": "private", "no-such-name.invalid": "no-such-name"} {
		_, _, err := find(t, b, "a", host+"/app:1", "")
		var hides interface{ ForAdmins() string }
		if !errors.Is(err, node.ErrInterrupted) || !errors.As(err, &hides) || !strings.Contains(hides.ForAdmins(), cause) {
			t.Errorf("%s: %v", host, err)
			continue
		}
		texts[strings.ReplaceAll(err.Error(), host, "HOST")] = true
	}
	if len(texts) != 1 {
		t.Errorf("the errors differ: %v", texts)
	}
	b.Guard = nil
	if _, _, err := find(t, b, "a", "10.1.2.3/app:1", ""); err == nil || errors.Is(err, node.ErrInterrupted) {
		t.Errorf("without a guard: %v", err)
	}
}

// FuzzRegistryHost: a host that credentials are kept for is the one that images name.
func FuzzRegistryHost(f *testing.F) {
	for _, seed := range []string{
		"docker.io", "index.docker.io", "registry.example.com:5000", "localhost", "localhost:5000", "127.0.0.1:5000", "[::1]:5000", "[::ffff:127.0.0.1]", "a", "a:0", "a:1",
		"A.example", "a.example/b", "u@a.example", "a.example:", "a..b", "-a.b", "[fe80::1%25eth0]:1", "xn--a.b", "1.2.3", "a_b.c",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		host, err := sandbox.ParseRegistryHost(text)
		if err != nil {
			return
		}
		ref, err := image.ParseReference(string(host) + "/team/app:1")
		if err != nil {
			t.Fatalf("%q is %q, and no image is there: %v", text, host, err)
		}
		if ref.Registry() != string(host) {
			t.Errorf("%q is %q, and an image there is of %q", text, host, ref.Registry())
		}
		if again, err := sandbox.ParseRegistryHost(string(host)); err != nil || again != host {
			t.Errorf("%q is %q, and that %q: %v", text, host, again, err)
		}
	})
}

// TestPulledInVain: a build that has pulled another image than its template was applied with
// says which, and how large it is: it is on the disk, and counts.
func TestPulledInVain(t *testing.T) {
	b, name := guarded(t)
	pin := "sha256:" + strings.Repeat("0", 64)
	built, err := b.Build(t.Context(), node.BuildRequest{
		Namespace: "a", Spec: sandbox.TemplateSpec{Image: name}, Image: pin, Log: io.Discard,
		Pull:        func() error { return nil },
		Credentials: func(string) (string, string, bool) { return "alice", "secret", true },
	})
	img, there := b.Images.ResolveIn("a", name)
	if err == nil || there != nil || built.Pulled != uint64(img.Size()) || built.Image != string(img.Digest) {
		t.Errorf("%+v, %v; the image: %v, %v", built, err, img, there)
	}
}
