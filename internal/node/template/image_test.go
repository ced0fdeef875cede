package template

import (
	"archive/tar"
	"bytes"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/image"
)

// archive writes an image with one file into an archive.
func archive(t *testing.T, tag, content string) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Size: int64(len(content))})
	if err == nil {
		_, err = io.WriteString(w, content)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: "amd64"})
	if err == nil {
		img, err = mutate.AppendLayers(img, layer)
	}
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.NewTag(tag)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "image.tar")
	if err := tarball.WriteToFile(path, ref, img); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPinnedImage: a build takes the image that its template was applied with, whatever the name
// leads to by now, or fails and says so.
func TestPinnedImage(t *testing.T) {
	store, err := image.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	b := &Builder{Images: store}
	ctx := t.Context()
	load := func(content string) string {
		t.Helper()
		made, err := store.Import(ctx, archive(t, "team/app:1", content), image.ImportOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return string(made[0].Digest)
	}
	if got := b.ResolveImage(ctx, node.ImageQuestion{Namespace: sandbox.DefaultNamespace, Name: "/no/name"}); got != "" {
		t.Errorf("%q", got)
	}
	first := load("one")
	if got := b.ResolveImage(ctx, node.ImageQuestion{Namespace: sandbox.DefaultNamespace, Name: "team/app:1"}); got != first {
		t.Errorf("%q, not %q", got, first)
	}
	second := load("two")
	if got := b.ResolveImage(ctx, node.ImageQuestion{Namespace: sandbox.DefaultNamespace, Name: "team/app:1"}); got != second || first == second {
		t.Errorf("%q, not %q", got, second)
	}
	found := func(pin string) (string, error) {
		handle, img, err := b.find(ctx, node.BuildRequest{Namespace: sandbox.DefaultNamespace, Spec: sandbox.TemplateSpec{Image: "team/app:1"}, Image: pin, Log: io.Discard})
		if err != nil {
			return "", err
		}
		return string(img.Digest), handle.Close()
	}
	for pin, want := range map[string]string{first: first, second: second, "": second} {
		if got, err := found(pin); err != nil || got != want {
			t.Errorf("pinned to %q: %q, %v", pin, got, err)
		}
	}
	gone := "sha256:" + strings.Repeat("0", 64)
	if _, err := found(gone); err == nil || !strings.Contains(err.Error(), "image team/app:1 is "+second+" now") || !strings.Contains(err.Error(), "apply it again") {
		t.Errorf("%v", err)
	}
}

// TestResolveImageOfNamespace: a name leads a namespace to an image that it may use, here or at
// the registry with its own credentials, and to nothing else that is on the node.
func TestResolveImageOfNamespace(t *testing.T) {
	b, name := guarded(t)
	digest, _, err := find(t, b, "a", name, "alice")
	if err != nil {
		t.Fatal(err)
	}
	as := func(user string) node.Credentials {
		return func(string) (string, string, bool) { return user, "secret", user != "" }
	}
	for _, c := range []struct {
		namespace sandbox.Namespace
		text      string
		user      string
		want      string
	}{
		{"a", name, "", digest}, {"a", digest, "", digest},
		{"b", name, "", ""}, {"b", digest, "", ""}, {"b", digest, "alice", ""}, {"b", name, "alice", digest},
	} {
		if got := b.ResolveImage(t.Context(), node.ImageQuestion{Namespace: c.namespace, Name: c.text, Credentials: as(c.user)}); got != c.want {
			t.Errorf("%s asks for %s as %q: %q, not %q", c.namespace, c.text, c.user, got, c.want)
		}
	}
}
