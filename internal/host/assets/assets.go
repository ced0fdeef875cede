// Package assets finds the files that sandboxes are made of: the guest kernel, the guest agent,
// the vmm and netd programs and gVisor's helper. They lie together in one folder: the folder of
// the running program, or the folder that AGENTRUN_ASSETS names.
package assets

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// EnvFolder names the environment variable that overrides the folder.
const EnvFolder = "AGENTRUN_ASSETS"

// Asset is one file, by the name under which it is installed.
type Asset string

// The files of which sandboxes are made.
const (
	Kernel     Asset = "vmlinux"
	GuestAgent Asset = "guest-agent"
	VMM        Asset = "vmm"
	// Netd is the network of a namespace's sandboxes.
	Netd Asset = "netd"
	// GVisorHelper runs sandboxes on gVisor.
	GVisorHelper Asset = "gvisor-helper"
	// TestGuest is the bare guest that measures the host's side of a VM.
	TestGuest Asset = "testguest.elf"
)

// Folder returns the folder of the assets.
func Folder() (string, error) {
	if dir := os.Getenv(EnvFolder); dir != "" {
		return filepath.Abs(dir)
	}
	exe, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the folder of this program: %w", err)
	}
	if exe, err = filepath.EvalSymlinks(exe); err != nil {
		return "", fmt.Errorf("find the folder of this program: %w", err)
	}
	return filepath.Dir(exe), nil
}

// EnvCache names the environment variable that overrides the cache folder.
const EnvCache = "AGENTRUN_CACHE"

// CacheFolder returns the folder of kernels, images and the testbed's QEMU. The
// build scripts use the same folder.
func CacheFolder() (string, error) {
	if dir := os.Getenv(EnvCache); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a cache folder (set %s): %w", EnvCache, err)
	}
	return filepath.Join(dir, "agentrun"), nil
}

// Path finds an asset.
func Path(a Asset) (string, error) {
	dir, err := Folder()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, string(a))
	if _, err := os.Stat(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("%s is not in %s: run make build, or set %s to the folder that has it", a, dir, EnvFolder)
		}
		return "", fmt.Errorf("find %s: %w", a, err)
	}
	return path, nil
}

// Open opens an asset for reading.
func Open(a Asset) (*os.File, error) {
	path, err := Path(a)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", a, err)
	}
	return f, nil
}
