// Package pack tests how the agentrun command packs and unpacks snapshots, with
// scripts that read like the manual (testdata/*.txtar). It uses real sandboxes
// of this machine's engine, and a registry on this machine.
package pack

import (
	"crypto/elliptic"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/layer"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
)

func TestScripts(t *testing.T) {
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(t.TempDir(), "busybox")
	if out, err := exec.Command("../../guest/rootfs/busybox.sh", root).CombinedOutput(); err != nil {
		t.Fatalf("make a root filesystem: %v\n%s", err, out)
	}
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	kind, _ := pick.Choose(pick.Auto)
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", folder+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("ROOTFS", root)
			env.Setenv("ASSETS", folder)
			env.Setenv("REGISTRY", server.Listener.Addr().String())
			env.Setenv("COSIGN_PASSWORD", "open sesame")
			env.Defer(func() {
				for _, state := range []string{"here", "there", "elsewhere"} {
					_ = os.RemoveAll(layer.ResidentFolder(filepath.Join(env.WorkDir, state)))
				}
			})
			return errors.Join(writeKeys(env.WorkDir, "team"), writeKeys(env.WorkDir, "stranger"))
		},
		Condition: func(cond string) (bool, error) {
			switch cond {
			case string(pick.GVisor), string(pick.MicroVM):
				return cond == string(kind), nil
			}
			return false, errors.New("no such condition")
		},
		RequireExplicitExec: true,
	})
}

// writeKeys makes NAME.key and NAME.pub as cosign generate-key-pair does.
func writeKeys(dir, name string) error {
	private, public, err := cryptoutils.GeneratePEMEncodedECDSAKeyPair(elliptic.P256(), func(bool) ([]byte, error) { return []byte("open sesame"), nil })
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(filepath.Join(dir, name+".key"), private, 0o600), os.WriteFile(filepath.Join(dir, name+".pub"), public, 0o600))
}
