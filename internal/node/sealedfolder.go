package node

import (
	"errors"
	"os"
	"path/filepath"

	"agentrun.dev/internal/storage/seal"
)

// sealedFolder has files that are sealed for the next daemon.
type sealedFolder struct {
	dir string
	key *seal.Key // nil: there are none, and none can be made
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

// write makes or replaces a file; whoever is killed meanwhile has changed nothing.
func (s sealedFolder) write(name string, b []byte) error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(s.dir, tempSecret)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), filepath.Join(s.dir, name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return s.sync()
}

// sync makes the names in the folder durable.
func (s sealedFolder) sync() error {
	dir, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
