package node

import (
	"errors"
	"os"
	"path/filepath"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/storage/seal"
)

// sealedFolder contains files that are sealed for the next daemon.
type sealedFolder struct {
	dir string
	key *seal.Key // nil: the folder has no files, and refuses new ones
}

// read unseals a file.
func (s sealedFolder) read(name string) ([]byte, error) {
	path := filepath.Join(s.dir, name)
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxSecretFile {
		return nil, errors.New("it is no file that a daemon has written")
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return s.key.Unseal(b)
}

// write makes or replaces a file. A kill in between leaves the old state.
func (s sealedFolder) write(name string, b []byte) error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	return durable.WriteFile(filepath.Join(s.dir, name), b, 0o600)
}

// sync makes the names in the folder durable.
func (s sealedFolder) sync() error { return durable.SyncFolder(s.dir) }
