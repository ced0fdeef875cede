package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal"
)

// loginStore holds the credentials of namespaces for registries in memory. For the next
// daemon it also keeps them sealed in a folder: one file each, named by the namespace.
type loginStore struct {
	sealedFolder

	turns keyTurns // held while the credentials of a namespace, and its file, are changed

	mu  sync.Mutex // protects all
	all map[sandbox.Namespace]*loginRecord
}

// loginRecord is the content of a sealed file. A record in the store never
// changes.
type loginRecord struct {
	// Namespace is also inside the file, so that the file cannot be used for
	// another namespace.
	Namespace  sandbox.Namespace                    `json:"namespace"`
	Registries map[sandbox.RegistryHost]loginSecret `json:"registries"`
}

type loginSecret struct {
	Username string    `json:"username"`
	Password []byte    `json:"password"`
	Changed  time.Time `json:"changed"`
}

// String shows nothing of the passwords.
func (r *loginRecord) String() string { return "loginRecord{…}" }

// GoString is the output of %#v.
func (r *loginRecord) GoString() string { return r.String() }

// openLogins reads the credentials that an earlier daemon has sealed. openSecrets has
// already checked the key.
func openLogins(dir string, key *seal.Key) (*loginStore, error) {
	s := &loginStore{sealedFolder: sealedFolder{dir, key}, all: map[sandbox.Namespace]*loginRecord{}}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || key == nil {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the credentials for registries: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempSecret) { // left by a writer that was killed
			err = os.Remove(filepath.Join(dir, e.Name()))
		} else {
			err = s.load(e.Name())
		}
		if err != nil {
			return nil, fmt.Errorf("open the credentials for registries of namespace %s: %w", e.Name(), err)
		}
	}
	return s, nil
}

func (s *loginStore) load(name string) error {
	b, err := s.read(name)
	if err != nil {
		return err
	}
	var r loginRecord
	if json.Unmarshal(b, &r) != nil { // the error may contain a part of a password
		return errors.New("it is damaged")
	}
	if string(r.Namespace) != name {
		return errors.New("it is that of another namespace")
	}
	s.all[r.Namespace] = &r
	return nil
}

func (s *loginStore) of(n sandbox.Namespace) *loginRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[n]
}

// credentials returns the credentials of a namespace for a registry.
func (s *loginStore) credentials(n sandbox.Namespace, registry string) (user, password string, ok bool) {
	r := s.of(n)
	if r == nil {
		return "", "", false
	}
	l, ok := r.Registries[sandbox.RegistryHost(registry)]
	return l.Username, string(l.Password), ok
}

// list returns the public part of the credentials, sorted.
func (s *loginStore) list(n sandbox.Namespace) (out []sandbox.RegistryLogin) {
	if r := s.of(n); r != nil {
		for registry, l := range r.Registries {
			out = append(out, l.public(n, registry))
		}
	}
	return sandbox.SortedLogins(out)
}

func (l loginSecret) public(n sandbox.Namespace, registry sandbox.RegistryHost) sandbox.RegistryLogin {
	return sandbox.RegistryLogin{Namespace: n, Registry: registry, Username: l.Username, Changed: l.Changed}
}

func (s *loginStore) set(n sandbox.Namespace, registry sandbox.RegistryHost, c sandbox.RegistryCredentials) (out sandbox.RegistryLogin, err error) {
	l := loginSecret{Username: c.Username, Password: []byte(c.Password), Changed: time.Now().UTC()}
	err = s.change(n, func(all map[sandbox.RegistryHost]loginSecret) error {
		if _, there := all[registry]; !there && len(all) >= sandbox.MaxRegistryLogins {
			return sandbox.Errorf(sandbox.CodeInvalid, "namespace %s has credentials for %d registries already", n, len(all)).Try("Delete some")
		}
		all[registry] = l
		return nil
	})
	return l.public(n, registry), err
}

func (s *loginStore) remove(n sandbox.Namespace, registry sandbox.RegistryHost) error {
	return s.change(n, func(all map[sandbox.RegistryHost]loginSecret) error {
		if _, there := all[registry]; !there {
			return sandbox.Errorf(sandbox.CodeNotFound, "namespace %s has no credentials for %s", n, registry).
				Try("`agentrun registry ls -n %s` lists what there is", n)
		}
		delete(all, registry)
		return nil
	})
}

// change replaces the credentials of a namespace.
func (s *loginStore) change(n sandbox.Namespace, do func(map[sandbox.RegistryHost]loginSecret) error) error {
	if s.key == nil {
		return sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon keeps no credentials").Because("it has no key to seal them with")
	}
	defer s.turns.lock(sandbox.Key{Namespace: n})()
	next := &loginRecord{Namespace: n, Registries: map[sandbox.RegistryHost]loginSecret{}}
	if r := s.of(n); r != nil {
		maps.Copy(next.Registries, r.Registries)
	}
	if err := do(next.Registries); err != nil {
		return err
	}
	if err := s.store(next); err != nil {
		return fmt.Errorf("write the credentials for registries of namespace %s: %w", n, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all[n] = next; len(next.Registries) == 0 {
		delete(s.all, n)
	}
	return nil
}

// store writes a record, or removes the file of an empty one.
func (s *loginStore) store(r *loginRecord) error {
	if len(r.Registries) == 0 {
		return errors.Join(os.Remove(filepath.Join(s.dir, string(r.Namespace))), s.sync())
	}
	plain, err := json.Marshal(r)
	if err != nil {
		return errors.New("they cannot be encoded")
	}
	sealed, err := s.key.Seal(plain)
	if err != nil {
		return err
	}
	return s.write(string(r.Namespace), sealed)
}
