package debian

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// keyring is the file in which Debian's package of keys installs them.
const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// Sources are the lines of sources.list that a recipe's packages come from: the
// host's, for the recipe's suite.
func (r Recipe) Sources(ctx context.Context) ([]string, error) {
	if r.Mirror != "" {
		return []string{sourceLine(r.Mirror, r.Suite, keyOf(nil, r.Mirror))}, nil
	}
	host, err := hostSuite()
	if err != nil {
		return nil, err
	}
	targets, err := hostTargets(ctx)
	if err != nil {
		return nil, err
	}
	keys := hostKeys()
	var lines []string
	for _, t := range targets {
		suffix, ok := strings.CutPrefix(t.suite, host)
		if !ok || !slices.Contains([]string{"", "-updates", "-security"}, suffix) || t.component != "main" {
			continue // someone else's archive
		}
		if t.origin != "" && t.origin != "Debian" {
			continue
		}
		lines = append(lines, sourceLine(t.uri, r.Suite+suffix, keyOf(keys, t.uri)))
	}
	if len(lines) == 0 {
		return nil, fmt.Errorf("this host's apt has no archive of Debian %s to take %s from: give one with --mirror", host, r.Suite)
	}
	slices.Sort(lines) // the suite itself comes before its updates
	return slices.Compact(lines), nil
}

func sourceLine(uri, suite, key string) string {
	options := ""
	if key != "" {
		options = "[signed-by=" + key + "] "
	}
	return "deb " + options + uri + " " + suite + " main"
}

// withoutCredentials is a line of sources.list without the parts that must not
// stay in an image.
func withoutCredentials(line string) string {
	words := strings.Fields(line)
	for i, w := range words {
		if u, err := url.Parse(w); err == nil && u.User != nil {
			u.User = nil
			words[i] = u.String()
		}
		if strings.HasPrefix(w, "[signed-by=") { // the image's own keyring is enough
			words[i] = ""
		}
	}
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return w == "" }), " ")
}

// hostSuite is the code name of the host's release.
func hostSuite() (string, error) {
	f, err := os.Open("/etc/os-release")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if name, ok := strings.CutPrefix(s.Text(), "VERSION_CODENAME="); ok {
			return strings.Trim(name, `"'`), nil
		}
	}
	return "", errors.New("this host is no release of Debian: give an archive with --mirror")
}

type target struct{ uri, suite, component, origin string }

// hostTargets asks apt, which knows all forms of its configuration. Only
// archives whose lists were downloaded have a known origin.
func hostTargets(ctx context.Context) ([]target, error) {
	const format = "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(ORIGIN)"
	var targets []target
	for _, more := range [][]string{nil, {"--no-release-info"}} {
		args := slices.Concat([]string{"indextargets"}, more, []string{"--format", format, "Identifier: Packages"})
		out, err := exec.CommandContext(ctx, "apt-get", args...).Output()
		if err != nil {
			return nil, fmt.Errorf("ask apt for its archives: %w", err)
		}
		for line := range strings.Lines(string(out)) {
			words := strings.Split(strings.TrimSpace(line), "\t")
			if len(words) != 4 {
				continue
			}
			t := target{uri: strings.TrimSuffix(words[0], "/"), suite: words[1], component: words[2], origin: words[3]}
			if strings.HasPrefix(t.origin, "$(") { // apt did not know it
				t.origin = ""
			}
			targets = append(targets, t)
		}
		if len(targets) > 0 {
			break
		}
	}
	return targets, nil
}

// hostKeys finds the keys that the host's configuration assigns to archives.
// Apt itself does not report them.
func hostKeys() map[string]string {
	keys := map[string]string{}
	files, _ := filepath.Glob("/etc/apt/sources.list.d/*")
	for _, file := range append(files, "/etc/apt/sources.list") {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // there need not be such a file
		}
		if strings.HasSuffix(file, ".sources") {
			for stanza := range strings.SplitSeq(string(b), "\n\n") {
				addStanza(keys, stanza)
			}
			continue
		}
		for line := range strings.Lines(string(b)) {
			addLine(keys, line)
		}
	}
	return keys
}

func addStanza(keys map[string]string, stanza string) {
	fields := map[string]string{}
	for line := range strings.Lines(stanza) {
		if name, value, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(line, "#") {
			fields[strings.ToLower(name)] = strings.TrimSpace(value)
		}
	}
	for uri := range strings.FieldsSeq(fields["uris"]) {
		if key := fields["signed-by"]; filepath.IsAbs(key) && !strings.ContainsAny(key, " \t") {
			keys[strings.TrimSuffix(uri, "/")] = key
		}
	}
}

func addLine(keys map[string]string, line string) {
	words := strings.Fields(line)
	if len(words) < 3 || words[0] != "deb" {
		return
	}
	key := ""
	for _, w := range words[1:] {
		w = strings.Trim(w, "[]")
		if k, ok := strings.CutPrefix(w, "signed-by="); ok && filepath.IsAbs(k) {
			key = k
		}
		if strings.Contains(w, "://") && key != "" {
			keys[strings.TrimSuffix(w, "/")] = key
		}
	}
}

// keyOf is the keyring that an archive is signed with: the host's choice, or
// Debian's own, or those that the host's apt trusts.
func keyOf(keys map[string]string, uri string) string {
	if key := keys[uri]; key != "" {
		return key
	}
	if _, err := os.Stat(keyring); err == nil {
		return keyring
	}
	return ""
}

// aptOptions are settings of the host's apt without which archives may not be
// reachable: proxies, certificates, credentials.
func aptOptions(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, "apt-config", "dump", "--no-empty", "Acquire").Output()
	if err != nil {
		return nil, fmt.Errorf("ask apt for its settings: %w", err)
	}
	var options []string
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		name, _, _ := strings.Cut(line, " ")
		for _, wanted := range []string{"Acquire::http::", "Acquire::https::", "Acquire::Check-Valid-Until", "Acquire::Retries", "Acquire::ForceIPv"} {
			if strings.HasPrefix(strings.ToLower(name), strings.ToLower(wanted)) && !strings.HasSuffix(name, "::") {
				options = append(options, strings.TrimSuffix(line, ";"))
			}
		}
	}
	for name, path := range map[string]string{"Dir::Etc::netrc": "/etc/apt/auth.conf", "Dir::Etc::netrcparts": "/etc/apt/auth.conf.d"} {
		if _, err := os.Stat(path); err == nil {
			options = append(options, fmt.Sprintf("%s %q", name, path))
		}
	}
	slices.Sort(options)
	return options, nil
}
