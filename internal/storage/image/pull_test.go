package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	erofs "github.com/erofs/go-erofs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// capNetRaw is security.capability of a program with cap_net_raw=ep.
const capNetRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// TestPull: layers of all compressions, over TLS with a private authority, by
// tag and by digest; the configuration comes along.
func TestPull(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	config := v1.Config{
		Env: []string{"PATH=/bin", "A=1"}, User: "1000:1000", WorkingDir: "/work/deep", Entrypoint: []string{"/bin/entry"},
		Cmd: []string{"serve"}, ExposedPorts: map[string]struct{}{"80/tcp": {}, "443/tcp": {}}, Labels: map[string]string{"l": "v"},
	}
	img := imageOf(t, config,
		layerOf(t, tarOf(t, map[string]string{"bin/": "", "bin/tool": "one", "gone": "x"})),
		zstdLayer(t, tarOf(t, map[string]string{"bin/tool": "two", ".wh.gone": ""})),
		plainLayer(t, tarOf(t, map[string]string{"etc/conf": "three"})))
	ref := r.push(t, "team/app:v1", img)
	var phases []Phase
	var last Progress
	o := r.options(t)
	o.Progress = func(p Progress) {
		if !slices.Contains(phases, p.Phase) {
			phases = append(phases, p.Phase)
		}
		if p.Done > p.Total {
			t.Errorf("%d of %d bytes", p.Done, p.Total)
		}
		if p.Phase == PhaseDownload {
			last = p
		}
	}
	if d, err := Lookup(t.Context(), ref, o); err != nil || d != digestOf(t, img) || len(phases) > 0 {
		t.Errorf("looked up: %s, %v, %v", d, err, phases)
	}
	got, err := s.Pull(t.Context(), ref, o)
	if err != nil {
		t.Fatal(err)
	}
	if got.Digest != digestOf(t, img) || got.Platform != "linux/amd64" || got.Source != ref.String() || got.Plain != nil {
		t.Errorf("got %+v", got)
	}
	want := Config{
		Env: []string{"PATH=/bin", "A=1"}, User: "1000:1000", WorkingDir: "/work/deep", Entrypoint: []string{"/bin/entry"},
		Cmd: []string{"serve"}, ExposedPorts: []string{"443/tcp", "80/tcp"}, Labels: map[string]string{"l": "v"},
	}
	if fmt.Sprint(got.Config) != fmt.Sprint(want) {
		t.Errorf("configuration %+v, want %+v", got.Config, want)
	}
	wantContent(t, s, got.Digest, map[string]string{"bin/tool": "two", "etc/conf": "three"})
	if !slices.Equal(phases[:2], []Phase{PhaseResolve, PhaseDownload}) || phases[len(phases)-1] != PhaseDone || !slices.Contains(phases, PhasePack) {
		t.Errorf("phases %v", phases)
	}
	if last.Total == 0 || last.Layers != 3 {
		t.Errorf("the last of downloading: %+v", last)
	}
	wantTidy(t, s)

	// The same again, by tag and by digest, costs no blob but the configuration.
	before := r.blobGets()
	for _, again := range []string{ref.String(), r.host + "/team/app@" + string(got.Digest)} {
		if img, err := s.Pull(t.Context(), mustRef(t, again), r.options(t)); err != nil || img.Digest != got.Digest {
			t.Errorf("%s: %v, %v", again, img, err)
		}
	}
	if n := r.blobGets() - before; n > 2 {
		t.Errorf("%d blobs were fetched again", n)
	}
	// Both names are local ones now, and the digest is one, too.
	for _, text := range []string{ref.String(), r.host + "/team/app@" + string(got.Digest), string(got.Digest), got.Digest.Short()} {
		if img, err := s.Resolve(text); err != nil || img.Digest != got.Digest || len(img.Names) != 2 {
			t.Errorf("%s: %+v, %v", text, img, err)
		}
	}
	if err := s.Verify(t.Context(), got.Digest); err != nil {
		t.Error(err)
	}
}

// TestPullKeepsAttributes: a root with file capabilities has a second form
// without, and says which programs have them.
func TestPullKeepsAttributes(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	ref := r.push(t, "cap", imageOf(t, v1.Config{}, layerOf(t, tarOf(t, nil,
		tar.Header{Typeflag: tar.TypeReg, Name: "ping", Mode: 0o4755, Uid: 70000, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": capNetRaw}},
		tar.Header{Typeflag: tar.TypeChar, Name: "null", Mode: 0o666, Devmajor: 1, Devminor: 3},
	))))
	img, err := s.Pull(t.Context(), ref, r.options(t))
	if err != nil {
		t.Fatal(err)
	}
	if img.Plain == nil || !slices.Equal(img.Capabilities, []string{"/ping"}) {
		t.Fatalf("got %+v", img)
	}
	h, err := s.Open(t.Context(), img.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for name, c := range map[string]struct {
		open func() (*os.File, error)
		want string
	}{"root": {h.Root, capNetRaw}, "plain root": {h.PlainRoot, ""}} {
		f, err := c.open()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		fsys, err := erofs.Open(f)
		if err != nil {
			t.Fatal(err)
		}
		ping, err := fsys.Open("ping")
		if err != nil {
			t.Fatal(err)
		}
		info, err := ping.Stat()
		if err != nil {
			t.Fatal(err)
		}
		st, ok := info.Sys().(*erofs.Stat)
		if !ok || st.UID != 70000 || st.Mode&os.ModeSetuid == 0 || st.Xattrs["security.capability"] != c.want {
			t.Errorf("%s: %+v, %v", name, st, info.Mode())
		}
	}
}

func TestPullChoosesPlatform(t *testing.T) {
	r, s := newRegistry(t, withTLS), newStore(t)
	var index v1.ImageIndex = mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range []string{"arm64", "amd64"} {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        imageFor(t, arch, v1.Config{}, layerOf(t, tarOf(t, map[string]string{"arch": arch}))),
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	ref := r.push(t, "multi", index)
	for _, arch := range []string{"amd64", "arm64"} {
		o := r.options(t)
		if arch == "arm64" { // amd64 is the default
			var err error
			if o.Platform, err = ParsePlatform("linux/arm64"); err != nil {
				t.Fatal(err)
			}
		}
		img, err := s.Pull(t.Context(), ref, o)
		if err != nil || img.Platform != "linux/"+arch {
			t.Fatalf("%s: %+v, %v", arch, img, err)
		}
		wantContent(t, s, img.Digest, map[string]string{"arch": arch})
	}
	o := r.options(t)
	o.Platform = Platform{OS: "linux", Architecture: "riscv64"}
	_, err := s.Pull(t.Context(), ref, o)
	wantError(t, err, ref.String(), "linux/riscv64", "linux/arm64, linux/amd64", "--platform")
	// An image without an index is for one platform.
	single := r.push(t, "single", imageFor(t, "arm64", v1.Config{}))
	_, err = s.Pull(t.Context(), single, r.options(t))
	wantError(t, err, "linux/arm64", "linux/amd64")
	for _, bad := range []string{"windows/amd64", "linux", "a/b/c/d", "/"} {
		if p, err := ParsePlatform(bad); err == nil {
			t.Errorf("platform %q became %v", bad, p)
		}
	}
}

func wantError(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error; want one that says %q", words)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("got %v; want it to say %q", err, w)
		}
	}
}

// TestRegistryAccess: private authorities, credentials and plain HTTP are used
// when they are given, and never else.
func TestRegistryAccess(t *testing.T) {
	img := imageOf(t, v1.Config{}, layerOf(t, tarOf(t, map[string]string{"a": "1"})))
	t.Run("unknown authority", func(t *testing.T) {
		r, s := newRegistry(t, withTLS), newStore(t)
		_, err := s.Pull(t.Context(), r.push(t, "x", img), PullOptions{})
		wantError(t, err, r.host, "certificate", "--ca-file")
	})
	t.Run("authority of another host", func(t *testing.T) {
		r, s := newRegistry(t, withTLS), newStore(t)
		o := PullOptions{Registries: Registries{Hosts: map[string]Registry{"other.example:5000": {CAFile: r.caFile(t)}}}}
		_, err := s.Pull(t.Context(), r.push(t, "x", img), o)
		wantError(t, err, "certificate")
	})
	t.Run("authority of this host, from a file", func(t *testing.T) {
		r, s := newRegistry(t, withTLS), newStore(t)
		path := filepath.Join(t.TempDir(), "registries.json")
		text := fmt.Sprintf(`{"registries": {%q: {"caFile": %q}}}`, r.host, r.caFile(t))
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		settings, err := LoadRegistries(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Pull(t.Context(), r.push(t, "x", img), PullOptions{Registries: settings}); err != nil {
			t.Error(err)
		}
	})
	t.Run("no authority in the file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "empty.pem")
		if err := os.WriteFile(path, []byte("nothing"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := newStore(t).Pull(t.Context(), mustRef(t, "host.example/x"), PullOptions{Registries: Registries{CAFiles: []string{path}}})
		wantError(t, err, path, "PEM")
	})
	t.Run("plain HTTP", func(t *testing.T) {
		r, s := newRegistry(t, plainHTTP), newStore(t)
		ref := r.push(t, "x", img)
		r.mu.Lock()
		clear(r.gets)
		r.mu.Unlock()
		_, err := s.Pull(t.Context(), ref, PullOptions{})
		wantError(t, err, r.host, "--plain-http "+r.host)
		r.mu.Lock()
		if len(r.gets) != 0 {
			t.Errorf("it was asked without TLS: %v", r.gets)
		}
		r.mu.Unlock()
		if _, err := s.Pull(t.Context(), ref, r.options(t)); err != nil {
			t.Error(err)
		}
	})
	t.Run("TLS to a host of plain HTTP is not tried", func(t *testing.T) {
		r, s := newRegistry(t, withTLS), newStore(t)
		o := r.options(t)
		o.Registries.Hosts = map[string]Registry{r.host: {PlainHTTP: true}}
		_, err := s.Pull(t.Context(), r.push(t, "x", img), o)
		wantError(t, err, r.host)
	})
	t.Run("a redirect to plain HTTP", func(t *testing.T) {
		r, other, s := newRegistry(t, withTLS), newRegistry(t, plainHTTP), newStore(t)
		ref := r.push(t, "x", img)
		other.push(t, "x", img)
		r.set(func(w http.ResponseWriter, req *http.Request) bool {
			if !strings.Contains(req.URL.Path, "/blobs/") {
				return false
			}
			http.Redirect(w, req, "http://"+other.host+req.URL.Path, http.StatusTemporaryRedirect)
			return true
		})
		_, err := s.Pull(t.Context(), ref, r.options(t))
		wantError(t, err, "plain HTTP to "+other.host+" is not allowed")
	})
	t.Run("credentials", func(t *testing.T) {
		r, s := newRegistry(t, withTLS), newStore(t)
		ref := r.push(t, "x", img)
		r.user = "bob"
		t.Setenv("DOCKER_CONFIG", t.TempDir())
		_, err := s.Pull(t.Context(), ref, r.options(t))
		wantError(t, err, "docker login "+r.host)
		dockerConfig(t, r.host, "bob", "wrong")
		_, err = s.Pull(t.Context(), ref, r.options(t))
		wantError(t, err, "docker login "+r.host)
		if strings.Contains(err.Error(), "wrong") {
			t.Errorf("the error has the password in it: %v", err)
		}
		dockerConfig(t, r.host, "bob", "secret")
		if _, err := s.Pull(t.Context(), ref, r.options(t)); err != nil {
			t.Error(err)
		}
	})
	t.Run("tokens", func(t *testing.T) {
		r, s := newRegistry(t, withTLS), newStore(t)
		ref := r.push(t, "x", img)
		realm := "https://" + r.host
		r.set(func(w http.ResponseWriter, req *http.Request) bool {
			user, password, _ := req.BasicAuth()
			switch {
			case req.URL.Path == "/token" && user == "bob" && password == "secret":
				_, _ = w.Write([]byte(`{"token": "opaque"}`))
			case req.URL.Path == "/token" || req.Header.Get("Authorization") != "Bearer opaque":
				w.Header().Set("WWW-Authenticate", `Bearer realm="`+realm+`/token",service="test"`)
				w.WriteHeader(http.StatusUnauthorized)
			default:
				return false
			}
			return true
		})
		dockerConfig(t, r.host, "bob", "wrong")
		_, err := s.Pull(t.Context(), ref, r.options(t))
		wantError(t, err, "docker login "+r.host)
		dockerConfig(t, r.host, "bob", "secret")
		if _, err := s.Pull(t.Context(), ref, r.options(t)); err != nil {
			t.Error(err)
		}
		// Credentials do not go to a token server without TLS.
		realm = "http://" + r.host
		_, err = newStore(t).Pull(t.Context(), ref, r.options(t))
		wantError(t, err, "not allowed", "https")
	})
	t.Run("settings that are none", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "registries.json")
		if err := os.WriteFile(path, []byte(`{"registries": {"x": {"insecure": true}}}`), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := LoadRegistries(path)
		wantError(t, err, path, "insecure")
		for _, rest := range []string{`, "allow": ["x.example"]}`, `{"allow": ["x.example"]}`} {
			if err := os.WriteFile(path, []byte(`{"registries": {}}`+rest), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := LoadRegistries(path)
			wantError(t, err, path, "follows")
		}
		for _, host := range []string{"", "Upper.example", "https://x.example", "a b", "docker.io"} {
			if err := (Registries{Hosts: map[string]Registry{host: {PlainHTTP: true}}}).Validate(); err == nil {
				t.Errorf("host %q was taken", host)
			}
		}
		if r, err := LoadRegistries(path + ".none"); err != nil || len(r.Hosts) != 0 {
			t.Errorf("a missing file: %v, %v", r, err)
		}
	})
}

// TestPullRefuses: faults of a registry that a pull must detect. It leaves no
// files behind.
func TestPullRefuses(t *testing.T) {
	good := layerOf(t, tarOf(t, map[string]string{"a": "1"}))
	archive := tarOf(t, map[string]string{"a": "1"})
	foreign := static.NewLayer([]byte("x"), types.OCIRestrictedLayer)
	lying := rawLayer{Layer: static.NewLayer(archive, types.OCIUncompressedLayer)}
	lying.diffID, _ = good.Digest()
	for _, c := range []struct {
		name string
		img  v1.Image
		says []string
	}{
		{"hostile layer", imageOf(t, v1.Config{}, good, layerOf(t, tarOf(t, map[string]string{"../evil": "1"}))), []string{"layer 2 of 2", `"../evil"`}},
		{"wrong DiffID", imageOf(t, v1.Config{}, lying), []string{"layer 1 of 1", "digest"}},
		{"layer of another registry", imageOf(t, v1.Config{}, foreign), []string{"layer 1 of 1", "nondistributable"}},
		{"no layer at all", imageOf(t, v1.Config{}, static.NewLayer([]byte("{}"), "application/vnd.cncf.helm.chart.content.v1.tar+gzip")), []string{"helm"}},
		{"no image", mutate.ConfigMediaType(imageOf(t, v1.Config{}, good), "application/vnd.cncf.helm.config.v1+json"), []string{"no image", "helm"}},
		{"environment", imageOf(t, v1.Config{Env: []string{"none"}}, good), []string{`"none"`}},
		{"zero byte", imageOf(t, v1.Config{Cmd: []string{"a\x00b"}}, good), []string{"zero byte"}},
		{"working folder", imageOf(t, v1.Config{WorkingDir: "rel"}, good), []string{`"rel"`}},
		{"working folder out", imageOf(t, v1.Config{WorkingDir: "/../.."}, good), []string{"/../.."}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, s := newRegistry(t, withTLS), newStore(t)
			ref := r.push(t, "x", c.img)
			_, err := s.Pull(t.Context(), ref, r.options(t))
			wantError(t, err, append(c.says, ref.String())...)
			wantTidy(t, s)
			if list, err := s.List(); err != nil || len(list) != 0 {
				t.Errorf("stored: %v, %v", list, err)
			}
		})
	}
	for text, says := range map[string]string{"UPPER": "UPPER", "a b": "a b", "x@sha256:12": "x@sha256:12", "": `""`} {
		_, err := ParseReference(text)
		wantError(t, err, says)
	}
}

// TestPullOverBadConnections: wrong bytes are an error, cut connections are
// tried again.
func TestPullOverBadConnections(t *testing.T) {
	layer, err := random.Layer(3<<20, types.OCILayer)
	if err != nil {
		t.Fatal(err)
	}
	img := imageOf(t, v1.Config{}, layer)
	digest, _ := layer.Digest()
	size, _ := layer.Size()
	blob := func(req *http.Request) bool {
		return req.Method == http.MethodGet && strings.HasSuffix(req.URL.Path, "/blobs/"+digest.String())
	}
	wrong := make([]byte, size)
	for name, c := range map[string]struct {
		answer func(t *testing.T, w http.ResponseWriter, try int) bool
		says   []string // or it succeeds
		tries  int
	}{
		"wrong content": {func(_ *testing.T, w http.ResponseWriter, _ int) bool {
			_, _ = w.Write(wrong)
			return true
		}, []string{digest.String(), "other content", "digest"}, 1},
		"too much": {func(_ *testing.T, w http.ResponseWriter, _ int) bool {
			_, _ = w.Write(wrong)
			_, _ = w.Write([]byte{1, 2, 3})
			return true
		}, []string{digest.String(), "more than"}, 1},
		"gone": {func(_ *testing.T, w http.ResponseWriter, _ int) bool {
			w.WriteHeader(http.StatusNotFound)
			return true
		}, []string{digest.String(), "404"}, 1},
		"cut once": {func(t *testing.T, w http.ResponseWriter, try int) bool {
			if try == 1 {
				cut(t, w, int(size), wrong[:1<<20])
				return true
			}
			return false
		}, nil, 2},
		"cut always": {func(t *testing.T, w http.ResponseWriter, _ int) bool {
			cut(t, w, int(size), wrong[:1<<20])
			return true
		}, []string{digest.String(), "of " + fmt.Sprint(size) + " bytes"}, layerAttempts},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, s := newRegistry(t, withTLS), newStore(t)
			ref := r.push(t, "x", img)
			var mu sync.Mutex
			tries := 0
			r.set(func(w http.ResponseWriter, req *http.Request) bool {
				if !blob(req) {
					return false
				}
				mu.Lock()
				tries++
				try := tries
				mu.Unlock()
				return c.answer(t, w, try)
			})
			_, err := s.Pull(t.Context(), ref, r.options(t))
			if c.says != nil {
				wantError(t, err, append(c.says, ref.String())...)
			} else if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if tries != c.tries {
				t.Errorf("%d tries, want %d", tries, c.tries)
			}
			wantTidy(t, s)
		})
	}
}

// TestWrongManifest: the manifest that a registry serves for a digest must have
// that digest, and so must the configuration.
func TestWrongManifest(t *testing.T) {
	img := imageOf(t, v1.Config{}, layerOf(t, tarOf(t, map[string]string{"a": "1"})))
	other := imageOf(t, v1.Config{}, layerOf(t, tarOf(t, map[string]string{"a": "2"})))
	config, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	for name, suffix := range map[string]string{"manifest": "/manifests/" + string(digestOf(t, img)), "configuration": "/blobs/" + config.String()} {
		r, s := newRegistry(t, withTLS), newStore(t)
		r.push(t, "x:1", img)
		served, err := other.RawManifest()
		if suffix[1] == 'b' {
			served, err = other.RawConfigFile()
		}
		if err != nil {
			t.Fatal(err)
		}
		r.set(func(w http.ResponseWriter, req *http.Request) bool {
			if req.Method != http.MethodGet || !strings.HasSuffix(req.URL.Path, suffix) {
				return false
			}
			w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
			_, _ = w.Write(served)
			return true
		})
		ref := mustRef(t, r.host+"/x@"+string(digestOf(t, img)))
		if got, err := s.Pull(t.Context(), ref, r.options(t)); err == nil {
			t.Errorf("%s: another one was taken: %+v", name, got)
		}
		wantTidy(t, s)
	}
}

// TestPullIsCancelled: in the middle of a layer.
func TestPullIsCancelled(t *testing.T) {
	layer, err := random.Layer(3<<20, types.OCILayer)
	if err != nil {
		t.Fatal(err)
	}
	r, s := newRegistry(t, withTLS), newStore(t)
	ref := r.push(t, "x", imageOf(t, v1.Config{}, layer))
	ctx, cancel := context.WithCancel(t.Context())
	digest, _ := layer.Digest()
	r.set(func(w http.ResponseWriter, req *http.Request) bool {
		if !strings.HasSuffix(req.URL.Path, "/blobs/"+digest.String()) {
			return false
		}
		_, _ = w.Write(make([]byte, 1<<20))
		_ = http.NewResponseController(w).Flush()
		cancel()
		<-req.Context().Done()
		return true
	})
	if _, err := s.Pull(ctx, ref, r.options(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was cancelled", err)
	}
	wantTidy(t, s)
}
