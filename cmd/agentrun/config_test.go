package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// settle gives a test an empty environment with these variables, and a
// configuration file if its text is not empty.
func settle(t *testing.T, file string, variables ...string) {
	t.Helper()
	home := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", home)
	t.Setenv("AGENTRUN_STATE", filepath.Join(home, "state"))
	for _, name := range []string{envServer, envKey, envCAFile} {
		t.Setenv(name, "")
	}
	for i := 0; i < len(variables); i += 2 {
		t.Setenv(variables[i], variables[i+1])
	}
	if file == "" {
		return
	}
	if err := os.Mkdir(filepath.Join(home, "agentrun"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, "agentrun", "config.yaml"), []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestFindDaemon: a flag precedes the environment, which precedes the file, which
// precedes the socket. A key of the file is sent only to the file's server.
func TestFindDaemon(t *testing.T) {
	const file = "server: https://file\napiKey: ar_file\ncaFile: ca.pem\n"
	for name, c := range map[string]struct {
		file, flag   string
		env          []string
		url, key, ca string
		socket       string
		named        bool
		says         string
		noDaemon     bool
	}{
		"nothing":             {noDaemon: true, says: "agentrun up starts one"},
		"a key and no server": {env: []string{envKey, "ar_env"}, noDaemon: true},
		"the file":            {file: file, url: "https://file", key: "ar_file", ca: "ca.pem"},
		"the environment":     {file: file, env: []string{envServer, "https://env"}, url: "https://env", named: true},
		"with a key":          {file: file, env: []string{envServer, "https://env", envKey, "ar_env", envCAFile, "e.pem"}, url: "https://env", key: "ar_env", ca: "e.pem", named: true},
		"the flag":            {file: file, flag: "https://flag", env: []string{envServer, "https://env"}, url: "https://flag", named: true},
		"the file's by flag":  {file: file, flag: "https://file", url: "https://file", key: "ar_file", ca: "ca.pem", named: true},
		"another key":         {file: file, env: []string{envKey, "ar_env"}, url: "https://file", key: "ar_env", ca: "ca.pem"},
		"a socket":            {file: file, flag: "unix:///run/s", env: []string{envKey, "ar_env"}, socket: "/run/s", named: true},
		"an unknown field":    {file: "sever: x\n", says: "config.yaml: sever: unknown field; did you mean server?"},
		"no YAML":             {file: "{", says: "config.yaml"},
		"no server":           {file: "apiKey: ar_x\n", says: "no server"},
	} {
		t.Run(name, func(t *testing.T) {
			settle(t, c.file, c.env...)
			at, err := findDaemon(c.flag)
			if c.noDaemon || c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) || errors.Is(err, errNoDaemon) != c.noDaemon {
					t.Errorf("%v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if at.URL != c.url || at.Key != c.key || filepath.Base("/"+at.CAFile) != filepath.Base("/"+c.ca) || at.Socket != c.socket || at.named != c.named {
				t.Errorf("%+v", at)
			}
			if c.ca == "ca.pem" && !filepath.IsAbs(at.CAFile) {
				t.Errorf("%s is not beside the file", at.CAFile)
			}
		})
	}
}
