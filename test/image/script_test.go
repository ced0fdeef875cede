// Package image tests the agentrun image commands with scripts that read like
// the manual (testdata/*.txtar), against registries on this machine.
package image

import (
	"archive/tar"
	"bytes"
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/host/assets"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/rogpeppe/go-internal/testscript"
)

func TestScripts(t *testing.T) {
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	serve := func(start func(*httptest.Server)) *httptest.Server {
		server := httptest.NewUnstartedServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
		server.Config.ErrorLog = log.New(io.Discard, "", 0)
		start(server)
		t.Cleanup(server.Close)
		return server
	}
	plain, secure := serve((*httptest.Server).Start), serve((*httptest.Server).StartTLS)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw})
	if err := os.WriteFile(ca, block, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, server := range []*httptest.Server{plain, secure} {
		push(t, server, "team/app:1", "etc/app.conf", "one")
		push(t, server, "team/evil:1", "../../etc/passwd", "evil")
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", folder+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("AGENTRUN_STATE", filepath.Join(env.WorkDir, "state"))
			env.Setenv("PLAIN", plain.Listener.Addr().String())
			env.Setenv("SECURE", secure.Listener.Addr().String())
			env.Setenv("CA", ca)
			return nil
		},
		RequireExplicitExec: true,
	})
}

// push puts an image with one file into a registry.
func push(t *testing.T, server *httptest.Server, repository, file, content string) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: file, Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	config := &v1.ConfigFile{OS: "linux", Architecture: "amd64", Config: v1.Config{Cmd: []string{"serve"}, User: "www"}}
	made, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config.RootFS = made.RootFS
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(server.Listener.Addr().String()+"/"+repository, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	via := http.DefaultTransport
	if server.TLS != nil {
		via = server.Client().Transport
	}
	if err := remote.Write(ref, img, remote.WithTransport(via)); err != nil {
		t.Fatal(err)
	}
}
