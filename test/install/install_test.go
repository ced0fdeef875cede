// Package install tests where make install puts its files, and the systemd
// unit.
package install

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestInstall: the installed program finds the other files, every command has a
// manual page, and systemd accepts the unit, whose command is one of agentrun's.
func TestInstall(t *testing.T) {
	root := t.TempDir()
	cmd := exec.Command("../../scripts/install.sh")
	cmd.Env = append(os.Environ(), "DESTDIR="+root)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	program := filepath.Join(root, "usr/bin/agentrun")
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(program, args...)
		cmd.Env = slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "AGENTRUN_ASSETS=") })
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("agentrun %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	for line := range strings.Lines(run("--help")) {
		// "  apply       Make what ..."
		words := strings.Fields(line)
		if !strings.HasPrefix(line, "  ") || strings.HasPrefix(line, "   ") || len(words) < 2 || strings.HasPrefix(words[0], "-") || words[0] == "agentrun" || words[0] == "help" {
			continue
		}
		page, err := os.ReadFile(filepath.Join(root, "usr/share/man/man1/agentrun-"+words[0]+".1"))
		if err != nil || !strings.HasPrefix(string(page), ".nh\n.TH") {
			t.Errorf("the manual page of %s: %v, %.20q", words[0], err, page)
		}
	}
	for _, completion := range []string{"bash-completion/completions/agentrun", "zsh/site-functions/_agentrun", "fish/vendor_completions.d/agentrun.fish"} {
		if info, err := os.Stat(filepath.Join(root, "usr/share", completion)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", completion, err)
		}
	}
	unit := filepath.Join(root, "usr/lib/systemd/system/agentrun.service")
	text, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "\nExecStart=/usr/lib/agentrun/agentrun up ") || !strings.Contains(string(text), "\nKillMode=process\n") {
		t.Errorf("the unit says\n%s", text)
	}
	run("up", "--help")
	// systemd checks that the program is where the unit says.
	local := strings.ReplaceAll(string(text), "/usr/lib/agentrun", filepath.Join(root, "usr/lib/agentrun"))
	if err := os.WriteFile(unit, []byte(local), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("systemd-analyze", "verify", "--man=no", unit).CombinedOutput(); err != nil {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}
