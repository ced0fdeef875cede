package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// layoutOf writes an OCI layout of an image, named as given.
func layoutOf(t *testing.T, what mutate.Appendable, annotations map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layout")
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	switch what := what.(type) {
	case v1.Image:
		err = path.AppendImage(what, layout.WithAnnotations(annotations))
	case v1.ImageIndex:
		err = path.AppendIndex(what, layout.WithAnnotations(annotations))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// tarDir packs a folder.
func tarDir(t *testing.T, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := errors.Join(w.AddFS(os.DirFS(dir)), w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func writeTemp(t *testing.T, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "archive.tar")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func gzipped(t *testing.T, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(b)
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// dockerSave writes what docker save does: archives of layers, uncompressed,
// and manifest.json.
func dockerSave(t *testing.T, tag string, config v1.Config, archives ...[]byte) []byte {
	t.Helper()
	files := map[string]string{}
	cf := v1.ConfigFile{OS: "linux", Architecture: "amd64", Config: config, RootFS: v1.RootFS{Type: "layers"}}
	d := tarball.Descriptor{Config: "config.json", RepoTags: []string{tag}}
	for i, a := range archives {
		h, _, err := v1.SHA256(bytes.NewReader(a))
		if err != nil {
			t.Fatal(err)
		}
		name := strings.Repeat("l", i+1) + "/layer.tar"
		files[name] = string(a)
		cf.RootFS.DiffIDs = append(cf.RootFS.DiffIDs, h)
		d.Layers = append(d.Layers, name)
	}
	for name, v := range map[string]any{"config.json": cf, "manifest.json": tarball.Manifest{d}} {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = string(b)
	}
	return tarOf(t, files)
}

// TestImport: all forms of the same image come out as the same files.
func TestImport(t *testing.T) {
	archives := [][]byte{tarOf(t, map[string]string{"a": "1", "b": "2"}), tarOf(t, map[string]string{".wh.a": "", "c": "3"})}
	config := v1.Config{Cmd: []string{"run"}}
	img := imageOf(t, config, layerOf(t, archives[0]), zstdLayer(t, archives[1]))
	named := map[string]string{annotationRefName: "registry.example/team/app:1"}
	byTool := filepath.Join(t.TempDir(), "saved.tar")
	tag, err := name.NewTag("registry.example/team/app:1")
	if err != nil {
		t.Fatal(err)
	}
	gzipImage := imageOf(t, config, layerOf(t, archives[0]), layerOf(t, archives[1]))
	if err := tarball.WriteToFile(byTool, tag, gzipImage); err != nil {
		t.Fatal(err)
	}
	layoutDir := layoutOf(t, img, named)
	for form, c := range map[string]struct {
		path   string
		digest Digest // if it is known
	}{
		"layout folder":             {layoutDir, digestOf(t, img)},
		"layout archive":            {writeTemp(t, tarDir(t, layoutDir)), digestOf(t, img)},
		"compressed layout archive": {writeTemp(t, gzipped(t, tarDir(t, layoutDir))), digestOf(t, img)},
		"docker save":               {writeTemp(t, dockerSave(t, "registry.example/team/app:1", config, archives...)), ""},
		"docker save, compressed layers": {byTool, func() Digest {
			h, err := gzipImage.ConfigName()
			if err != nil {
				t.Fatal(err)
			}
			return Digest(h.String())
		}()},
	} {
		t.Run(form, func(t *testing.T) {
			s := newStore(t)
			got, err := s.Import(t.Context(), c.path, ImportOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != 1 || c.digest != "" && got[0].Digest != c.digest || len(got[0].Config.Cmd) != 1 {
				t.Fatalf("got %+v", got)
			}
			wantContent(t, s, got[0].Digest, map[string]string{"b": "2", "c": "3"})
			if img, err := s.Resolve("registry.example/team/app:1"); err != nil || img.Digest != got[0].Digest {
				t.Errorf("by its name: %v, %v", img, err)
			}
			mine := mustRef(t, "mine:2")
			if _, err := s.Import(t.Context(), c.path, ImportOptions{Name: &mine}); err != nil {
				t.Error(err)
			}
			if img, err := s.Resolve("mine:2"); err != nil || img.Digest != got[0].Digest {
				t.Errorf("by the name that was asked for: %v, %v", img, err)
			}
			wantTidy(t, s)
		})
	}
}

// TestImportChooses: platforms, invalid names, and several images.
func TestImportChooses(t *testing.T) {
	s := newStore(t)
	var index v1.ImageIndex = empty.Index
	for _, arch := range []string{"arm64", "amd64"} {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        imageFor(t, arch, v1.Config{}, layerOf(t, tarOf(t, map[string]string{"arch": arch}))),
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	got, err := s.Import(t.Context(), layoutOf(t, index, map[string]string{annotationRefName: "latest"}), ImportOptions{})
	if err != nil || len(got) != 1 {
		t.Fatalf("%v, %v", got, err)
	}
	wantContent(t, s, got[0].Digest, map[string]string{"arch": "amd64"})
	if img, err := s.Resolve(string(got[0].Digest)); err != nil || len(img.Names) != 0 {
		t.Errorf("a tag alone became the name %v, %v", img, err)
	}
	two := layoutOf(t, index, nil)
	if err := layout.Path(two).AppendImage(imageOf(t, v1.Config{})); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Import(t.Context(), two, ImportOptions{}); err != nil || len(got) != 2 {
		t.Errorf("%v, %v", got, err)
	}
	mine := mustRef(t, "mine")
	_, err = s.Import(t.Context(), two, ImportOptions{Name: &mine})
	wantError(t, err, two, "2 images")
}

// TestImportRefuses: archives are as hostile as layers.
func TestImportRefuses(t *testing.T) {
	good := tarOf(t, map[string]string{"a": "1"})
	img := imageOf(t, v1.Config{}, layerOf(t, good))
	manifest, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	blob := func(dir string, d v1.Hash) string { return filepath.Join(dir, "blobs", "sha256", d.Hex) }
	change := func(f func(dir string) error) string {
		dir := layoutOf(t, img, nil)
		if err := f(dir); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	for _, c := range []struct {
		name, path string
		says       []string
	}{
		{"missing", filepath.Join(t.TempDir(), "none"), []string{"no such file"}},
		{"empty folder", t.TempDir(), []string{"index.json", "manifest.json"}},
		{"garbage", writeTemp(t, bytes.Repeat([]byte("garbage!"), 200)), []string{"archive"}},
		{"archive that leaves its folder", writeTemp(t, tarOf(t, map[string]string{"../index.json": "{}"})), []string{`"../index.json"`}},
		{"archive with a device", writeTemp(t, tarOf(t, nil, tar.Header{Typeflag: tar.TypeFifo, Name: "index.json"})), []string{`"index.json"`, "device"}},
		{"link to the host's files", writeTemp(t, tarOf(t, map[string]string{
			"manifest.json": `[{"Config":"c.json","Layers":[]}]`}, tar.Header{Typeflag: tar.TypeSymlink, Name: "c.json", Linkname: "/etc/passwd"})), []string{"c.json", "escapes"}},
		{"path to the host's files", writeTemp(t, tarOf(t, map[string]string{"manifest.json": `[{"Config":"../../../../etc/passwd","Layers":[]}]`})), []string{"escapes"}},
		{"no image", writeTemp(t, tarOf(t, map[string]string{"manifest.json": `[]`})), []string{"no image"}},
		{"no JSON", writeTemp(t, tarOf(t, map[string]string{"manifest.json": `[`})), []string{"manifest.json"}},
		{"layers that are missing", writeTemp(t, tarOf(t, map[string]string{"manifest.json": `[{"Config":"c","Layers":["l"]}]`, "c": `{"os":"linux","architecture":"amd64"}`})), []string{"0 layers", "1"}},
		{"changed layer", change(func(dir string) error { return os.WriteFile(blob(dir, manifest.Layers[0].Digest), good, 0o600) }), []string{"digest"}},
		{"changed configuration", change(func(dir string) error { return os.WriteFile(blob(dir, manifest.Config.Digest), []byte("{}"), 0o600) }), []string{"digest"}},
		{"missing layer", change(func(dir string) error { return os.Remove(blob(dir, manifest.Layers[0].Digest)) }), []string{"no such file"}},
		{"blob that is a link", change(func(dir string) error {
			path := blob(dir, manifest.Layers[0].Digest)
			return errors.Join(os.Remove(path), os.Symlink("/etc/passwd", path))
		}), []string{"no file"}},
		{"wrong platform", layoutOf(t, imageFor(t, "s390x", v1.Config{}), nil), []string{"linux/s390x"}},
		{"hostile layer", writeTemp(t, dockerSave(t, "x", v1.Config{}, tarOf(t, map[string]string{"/etc/x": ""}))), []string{"layer 1 of 1", `"/etc/x"`}},
		{"hostile name", writeTemp(t, dockerSave(t, "../../x", v1.Config{}, good)), []string{"../../x"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore(t)
			_, err := s.Import(t.Context(), c.path, ImportOptions{})
			wantError(t, err, append(c.says, c.path)...)
			wantTidy(t, s)
			if list, err := s.List(); err != nil || len(list) != 0 {
				t.Errorf("stored: %v, %v", list, err)
			}
		})
	}
}

func TestCommand(t *testing.T) {
	c := Config{Entrypoint: []string{"entry"}, Cmd: []string{"a", "b"}, Env: []string{"A=1", "B=2"}}
	for _, x := range []struct{ args, want []string }{
		{nil, []string{"entry", "a", "b"}}, {[]string{"x"}, []string{"entry", "x"}},
	} {
		if got := strings.Join(c.Command(x.args), " "); got != strings.Join(x.want, " ") {
			t.Errorf("%v: %s", x.args, got)
		}
	}
	if got := strings.Join(c.Environ([]string{"B=3", "C"}), " "); got != "A=1 B=3 C" {
		t.Errorf("environment %s", got)
	}
}
