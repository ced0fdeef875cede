package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"agentrun.dev/internal/client"
	"agentrun.dev/internal/client/manifest"
	"agentrun.dev/internal/node/forkd"
)

// The address of a daemon on another machine, and the credentials for it. The
// Python SDK reads the same variables and the same file.
const (
	envServer = "AGENTRUN_SERVER"
	envKey    = "AGENTRUN_API_KEY"
	envCAFile = "AGENTRUN_CA_FILE"
)

// clientConfig is the configuration file of clients.
type clientConfig struct {
	// Server is the URL of the daemon.
	Server string `json:"server"`
	// APIKey is used for that server only.
	APIKey string `json:"apiKey"`
	// CAFile has the certificates that its own is verified with. Its path is
	// relative to the configuration file.
	CAFile string `json:"caFile"`
}

// readConfig reads the configuration file. A missing file is an empty
// configuration.
func readConfig(path string) (c clientConfig, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	if c, err = manifest.Unmarshal[clientConfig](data); err != nil {
		return c, fmt.Errorf("read the configuration %s: %w", path, err)
	}
	if c.APIKey != "" && info.Mode().Perm()&0o077 != 0 {
		return c, fmt.Errorf("read the configuration: others may read %s (mode %04o), and it has an API key. Run `chmod 600 %s`", path, info.Mode().Perm(), path)
	}
	if c.Server == "" && (c.APIKey != "" || c.CAFile != "") {
		return c, fmt.Errorf("read the configuration %s: it has no server, which apiKey and caFile are for", path)
	}
	if c.CAFile != "" && !filepath.IsAbs(c.CAFile) {
		c.CAFile = filepath.Join(filepath.Dir(path), c.CAFile)
	}
	return c, nil
}

// errNoDaemon says that no daemon runs, here or elsewhere.
var errNoDaemon = errors.New("no daemon is running")

// daemonAt is the address of a daemon.
type daemonAt struct {
	client.Config
	// named says that a flag or the environment has set it.
	named bool
}

// findDaemon finds the daemon: by the flag or the environment, by the
// configuration file, or on this machine's socket.
func findDaemon(flag string) (at daemonAt, err error) {
	server := flag
	if server == "" {
		server = os.Getenv(envServer)
	}
	at.named = server != ""
	var file clientConfig
	if dir, err := os.UserConfigDir(); err == nil { // a user without a home has no file
		if file, err = readConfig(filepath.Join(dir, "agentrun", "config.yaml")); err != nil {
			return at, err
		}
	}
	if server == "" {
		server = file.Server
	}
	if server == "" {
		return localDaemon()
	}
	if socket, ok := strings.CutPrefix(server, "unix://"); ok {
		at.Socket = socket
		return at, nil
	}
	at.URL, at.Key, at.CAFile = server, os.Getenv(envKey), os.Getenv(envCAFile)
	// The file's settings are for its server: its key is sent to no other.
	if server == file.Server {
		if at.Key == "" {
			at.Key = file.APIKey
		}
		if at.CAFile == "" {
			at.CAFile = file.CAFile
		}
	}
	return at, nil
}

func localDaemon() (at daemonAt, err error) {
	dir, err := daemonFolder()
	if err != nil {
		return at, err
	}
	at.Socket = forkd.Socket(dir)
	if _, err := os.Stat(at.Socket); err != nil {
		return at, fmt.Errorf("%w: agentrun up starts one, or set %s (%w)", errNoDaemon, envServer, err)
	}
	return at, nil
}
