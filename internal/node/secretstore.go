package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal"
)

// secretStore holds secrets in memory. For the next daemon it also keeps them
// sealed in a folder: one file each, named <namespace>.<name>. They are not in
// the journal.
type secretStore struct {
	sealedFolder

	turns keyTurns // held while a secret and its file are changed

	mu      sync.Mutex // protects records
	records map[sandbox.Key]*secretRecord
}

// secretRecord is the content of a sealed file. A record in the store never
// changes.
type secretRecord struct {
	// Namespace and Name are also inside the file, so that the file cannot be
	// used for another secret.
	Namespace sandbox.Namespace `json:"namespace"`
	Name      sandbox.Name      `json:"name"`
	Created   time.Time         `json:"created"`
	Changed   time.Time         `json:"changed"`
	Data      map[string][]byte `json:"data"`
}

// String shows nothing of the values.
func (r *secretRecord) String() string { return "secretRecord{…}" }

// GoString is the output of %#v.
func (r *secretRecord) GoString() string { return r.String() }

func (r *secretRecord) public() sandbox.Secret {
	return sandbox.Secret{Key: sandbox.Key{Namespace: r.Namespace, Name: r.Name}, Keys: slices.Sorted(maps.Keys(r.Data)), Created: r.Created, Changed: r.Changed}
}

// SecretsFolder is the folder with the secrets of a state folder.
func SecretsFolder(dir string) string { return filepath.Join(dir, secretsDir) }

// Names in the folder. Names of secrets never begin with a dot.
const (
	keyCheckName  = ".key"
	tempSecret    = ".new-"
	maxSecretFile = 8 << 20
)

// openSecrets reads the secrets that an earlier daemon has sealed.
func openSecrets(dir string, key *seal.Key) (*secretStore, error) {
	s := &secretStore{sealedFolder: sealedFolder{dir, key}, records: map[sandbox.Key]*secretRecord{}}
	if key == nil {
		return s, nil
	}
	if err := s.checkKey(); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open the secrets: %w", err)
	}
	for _, e := range entries {
		switch {
		case strings.HasPrefix(e.Name(), tempSecret): // left by a writer that was killed
			err = os.Remove(filepath.Join(dir, e.Name()))
		case e.Name() != keyCheckName:
			err = s.load(e.Name())
		}
		if err != nil {
			return nil, fmt.Errorf("open secret %s: %w", e.Name(), err)
		}
	}
	return s, nil
}

// checkKey refuses a key that differs from the last daemon's. Running sandboxes
// may come from images that were sealed with the last key, and would be given
// up.
func (s *secretStore) checkKey() error {
	path := filepath.Join(s.dir, keyCheckName)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if b, err = s.key.Seal([]byte(keyCheckName)); err == nil {
			err = s.write(keyCheckName, b)
		}
	}
	if err == nil {
		_, err = s.key.Unseal(b)
	}
	if errors.Is(err, seal.ErrKey) {
		return fmt.Errorf("open the secrets in %s: %w. Start with the key that this state folder was made with; if it is lost, so are the secrets and the hibernated sandboxes that hold them: remove that folder to go on without", s.dir, err)
	}
	if err != nil {
		return fmt.Errorf("open the secrets: %w", err)
	}
	return nil
}

func (s *secretStore) load(name string) error {
	b, err := s.read(name)
	if err != nil {
		return err
	}
	var r secretRecord
	if json.Unmarshal(b, &r) != nil { // the error may contain a part of a value
		return errors.New("it is damaged")
	}
	if k := (sandbox.Key{Namespace: r.Namespace, Name: r.Name}); secretFile(k) == name && sandbox.SecretData(r.Data).Validate() == nil {
		s.records[k] = &r
		return nil
	}
	return errors.New("it is the file of another secret")
}

// secretFile is the name of a secret's file. Names contain no dots.
func secretFile(k sandbox.Key) string { return string(k.Namespace) + "." + string(k.Name) }

func (s *secretStore) get(k sandbox.Key) *secretRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.records[k]
}

func (s *secretStore) all() []*secretRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.records))
}

// change replaces a record by the one that do returns, or removes it if do
// returns nil.
func (s *secretStore) change(k sandbox.Key, do func(old *secretRecord) (*secretRecord, error)) (sandbox.Secret, error) {
	if s.key == nil {
		return sandbox.Secret{}, sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon keeps no secrets").Because("it has no key for them")
	}
	defer s.turns.lock(k)()
	next, err := do(s.get(k))
	if err != nil {
		return sandbox.Secret{}, err
	}
	if next == nil {
		if err := errors.Join(os.Remove(filepath.Join(s.dir, secretFile(k))), s.sync()); err != nil {
			return sandbox.Secret{}, fmt.Errorf("delete secret %s: %w", k.Name, err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.records, k)
		return sandbox.Secret{}, nil
	}
	plain, err := json.Marshal(next)
	if err != nil {
		return sandbox.Secret{}, fmt.Errorf("write secret %s: it cannot be encoded", k.Name)
	}
	sealed, err := s.key.Seal(plain)
	if err == nil {
		err = s.write(secretFile(k), sealed)
	}
	if err != nil {
		return sandbox.Secret{}, fmt.Errorf("write secret %s: %w", k.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records[k] = next
	return next.public(), nil
}
