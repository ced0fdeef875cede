package rest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestManual runs the examples of docs/api.md in order, in one shell each,
// which has the variables of the earlier ones.
func TestManual(t *testing.T) {
	n := newNode(t)
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "api.md"))
	if err != nil {
		t.Fatal(err)
	}
	setting := "shopt -s expand_aliases\n"
	ran := 0
	for _, block := range strings.Split(string(text), "```console\n")[1:] {
		block, _, _ = strings.Cut(block, "```")
		for _, example := range strings.Split("\n"+block, "\n$ ")[1:] {
			command, want, _ := strings.Cut(example, "\n")
			if strings.HasPrefix(command, "alias ") || regexp.MustCompile(`^\w+=\S+$`).MatchString(command) {
				setting += command + "\n"
				continue
			}
			if strings.Contains(command, "$N/sandboxes\n") || strings.HasSuffix(command, "$N/sandboxes") {
				n.Eventually(func() bool { return strings.Contains(string(n.do("GET", v1+"/pools/agents", nil).body), `"ready":2`) })
			}
			cmd := exec.CommandContext(t.Context(), "bash", "-c", setting+command)
			cmd.Env = append(os.Environ(), "SOCKET="+n.socket)
			got, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("$ %s\n%s%v", command, got, err)
			}
			ran++
			pattern := strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(want)), `\.\.\.`, `(?s:.*)`)
			if !regexp.MustCompile(`^` + pattern + `$`).MatchString(strings.TrimSpace(string(got))) {
				t.Errorf("$ %s\n%s\nthe manual says:\n%s", command, got, want)
			}
		}
	}
	if ran < 20 {
		t.Errorf("%d examples", ran)
	}
}
