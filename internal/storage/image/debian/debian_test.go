package debian

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestValidate(t *testing.T) {
	good := Recipe{Suite: "bookworm", Include: []string{"python3", "libstdc++6", "g++", "curl=7.88.1-10+deb12u5", "libc6:amd64"},
		Pip: []string{"requests", "numpy>=2", "uvicorn[standard]==0.30.*", "a.b_c-d ~= 1.0"}, Mirror: "https://host.example/debian"}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for name, r := range map[string]Recipe{
		"no suite":              {},
		"option for a suite":    {Suite: "--help"},
		"path for a suite":      {Suite: "../x"},
		"option for a package":  {Suite: "sid", Include: []string{"-o"}},
		"list for a package":    {Suite: "sid", Include: []string{"a,b"}},
		"shell for a package":   {Suite: "sid", Include: []string{"a;b"}},
		"option for a wheel":    {Suite: "sid", Pip: []string{"--index-url=http://evil"}},
		"path for a wheel":      {Suite: "sid", Pip: []string{"./evil.whl"}},
		"url for a wheel":       {Suite: "sid", Pip: []string{"https://evil/x.whl"}},
		"lines for a wheel":     {Suite: "sid", Pip: []string{"a==1\n--index-url=http://evil"}},
		"nothing for a wheel":   {Suite: "sid", Pip: []string{""}},
		"path for a mirror":     {Suite: "sid", Mirror: "/etc/passwd"},
		"options for a mirror":  {Suite: "sid", Mirror: "[trusted=yes] http://evil"},
		"newline in the mirror": {Suite: "sid", Mirror: "http://a\ndeb http://evil"},
	} {
		if err := r.Validate(); err == nil {
			t.Errorf("%s: %+v was taken", name, r)
		}
	}
}

func TestPackages(t *testing.T) {
	for want, r := range map[string]Recipe{
		"":     {},
		"curl": {Include: []string{"curl"}},
		"python-is-python3 python3 python3-numpy python3-pip": {Include: []string{"python3-numpy", "python3"}},
		"python-is-python3 python3 python3-pip":               {Pip: []string{"x"}},
	} {
		if got := strings.Join(r.packages(), " "); got != want {
			t.Errorf("%+v: %q, want %q", r, got, want)
		}
	}
}

// TestSources: the archives are those of the host, and no others.
func TestSources(t *testing.T) {
	suite, err := hostSuite()
	if err != nil {
		t.Fatal(err)
	}
	lines, err := Recipe{Suite: suite}.Sources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	targets, err := hostTargets(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		known := false
		for _, target := range targets {
			known = known || strings.Contains(l, " "+target.uri+" ")
		}
		if !known || !strings.HasPrefix(l, "deb ") || !strings.Contains(l, " "+suite) {
			t.Errorf("%q is not of the host's %v", l, targets)
		}
	}
	mirror, err := Recipe{Suite: "sid", Mirror: "https://host.example/debian"}.Sources(t.Context())
	if err != nil || len(mirror) != 1 || !strings.HasSuffix(mirror[0], "https://host.example/debian sid main") {
		t.Errorf("%q, %v", mirror, err)
	}
}

func TestKeys(t *testing.T) {
	keys := map[string]string{}
	addStanza(keys, "Types: deb\n# a comment\nURIs: http://a.example/debian http://b.example/debian/\nSuites: x\nSigned-By: /keys/a.gpg\n")
	addStanza(keys, "URIs: http://inline.example\nSigned-By:\n -----BEGIN PGP\n")
	addLine(keys, "deb [arch=amd64 signed-by=/keys/c.gpg] http://c.example/debian suite main\n")
	addLine(keys, "deb http://d.example/debian suite main\n")
	addLine(keys, "# deb [signed-by=/keys/e.gpg] http://e.example suite main\n")
	want := map[string]string{"http://a.example/debian": "/keys/a.gpg", "http://b.example/debian": "/keys/a.gpg", "http://c.example/debian": "/keys/c.gpg"}
	if len(keys) != len(want) {
		t.Errorf("got %v", keys)
	}
	for uri, key := range want {
		if keys[uri] != key {
			t.Errorf("%s: %q, want %q", uri, keys[uri], key)
		}
	}
}

func TestWithoutCredentials(t *testing.T) {
	got := withoutCredentials("deb [signed-by=/x.gpg] https://bob:secret@host.example/debian bookworm main")
	if got != "deb https://host.example/debian bookworm main" {
		t.Errorf("got %q", got)
	}
	var said tail
	for range 1000 {
		_, _ = said.Write([]byte("E: failed to fetch https://bob:secret@host.example/x\n"))
	}
	if text := said.lines(); strings.Contains(text, "secret") || len(text) > 2*tailSize || !strings.Contains(text, "https://host.example/x") {
		t.Errorf("an error would say %q", text)
	}
}

func TestParseSettings(t *testing.T) {
	got := parseSettings(":env:.find-links='/env'\nglobal.cert='/global.pem'\nglobal.find-links='/global'\ninstall.cert='/install.pem'\n" +
		"global.extra-index-url='https://a\\nhttps://b'\nnonsense\ndownload.cert='/download.pem'\nglobal.quote='it\\'s'\n")
	for name, want := range map[string]string{
		"find-links": "/env", "cert": "/install.pem", "extra-index-url": "https://a\nhttps://b", "quote": "it's",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
}

// TestSettingsAreTakenOver: files of the host and those that settings name are
// where pip finds them in the image.
func TestSettingsAreTakenOver(t *testing.T) {
	home, links := t.TempDir(), t.TempDir()
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(home, ".config", "pip", "pip.conf"), "[global]\nindex-url = https://index.example\n")
	write(filepath.Join(home, ".netrc"), "machine index.example")
	write(filepath.Join(home, "own.conf"), "[global]\n")
	write(filepath.Join(home, "ca.pem"), "certificate")
	t.Setenv("HOME", home)
	t.Setenv("XDG_CONFIG_HOME", "")
	t.Setenv("PIP_CONFIG_FILE", filepath.Join(home, "own.conf"))
	t.Setenv("PIP_FIND_LINKS", links)
	t.Setenv("REQUESTS_CA_BUNDLE", filepath.Join(home, "ca.pem"))
	t.Setenv("HTTPS_PROXY", "http://proxy.example")
	in := &chroot{work: t.TempDir()}
	env, err := in.copySettings()
	if err != nil {
		t.Fatal(err)
	}
	if env, err = in.mapPaths(env, map[string]string{"find-links": links + "\nhttps://links.example", "client-cert": filepath.Join(home, "ca.pem")}); err != nil {
		t.Fatal(err)
	}
	all := "\n" + strings.Join(env, "\n") + "\n"
	for _, want := range []string{
		"PIP_CONFIG_FILE=/run/build/pip.conf", "PIP_FIND_LINKS=/run/build/links/0 https://links.example", "PIP_CERT=/run/build/ca.pem",
		"PIP_CLIENT_CERT=/run/build/client-cert", "HTTPS_PROXY=http://proxy.example", "PIP_USER=0",
	} {
		if !strings.Contains(all, "\n"+want+"\n") {
			t.Errorf("%s is not in %s", want, all)
		}
	}
	for _, file := range []string{"home/.config/pip/pip.conf", "home/.netrc", "pip.conf", "ca.pem", "client-cert"} {
		if _, err := os.Stat(filepath.Join(in.work, file)); err != nil {
			t.Error(err)
		}
	}
	if len(in.links) != 1 || in.links[0] != links {
		t.Errorf("links: %v", in.links)
	}
}

func TestTimes(t *testing.T) {
	root := t.TempDir()
	old, epoch := time.Unix(1e9, 0), time.Unix(1.5e9, 0)
	for name, at := range map[string]time.Time{"old": old, "packaged": epoch} {
		path := filepath.Join(root, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now().Add(-time.Minute)
	if err := os.Symlink("nowhere", filepath.Join(root, "new")); err != nil {
		t.Fatal(err)
	}
	if got, err := newestBefore(root, start); err != nil || !got.Equal(epoch) {
		t.Errorf("got %v, %v; want %v", got, err, epoch)
	}
	if err := clampTimes(root, epoch); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]time.Time{"old": old, "packaged": epoch, "new": epoch, ".": epoch} {
		info, err := os.Lstat(filepath.Join(root, name))
		if err != nil || !info.ModTime().Equal(want) {
			t.Errorf("%s: %v, %v; want %v", name, info.ModTime(), err, want)
		}
	}
}
