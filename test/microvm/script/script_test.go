// Package script tests the agentrun command with scripts that read like the
// manual (testdata/*.txtar), on real microVMs.
package script

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/host/assets"
	"github.com/rogpeppe/go-internal/testscript"
)

func TestScripts(t *testing.T) {
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(t.TempDir(), "busybox")
	if out, err := exec.Command("../../../guest/rootfs/busybox.sh", root).CombinedOutput(); err != nil {
		t.Fatalf("make a root filesystem: %v\n%s", err, out)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		// The scripts run agentrun as a user does, from PATH.
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", folder+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("ROOTFS", root)
			env.Setenv("TERM", "xterm")
			return nil
		},
		RequireExplicitExec: true,
	})
}
