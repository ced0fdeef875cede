package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/authority"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/storage/seal"
)

// authorityStore holds the CAs of namespaces in memory. For the next daemon it also
// keeps them sealed in a folder: one file each, named by the namespace.
type authorityStore struct {
	sealedFolder

	turns keyTurns // held while the CA of a namespace, and its file, are made

	mu  sync.Mutex // protects all
	all map[sandbox.Namespace]namespaceCA
}

// namespaceCA is a CA and the time when its namespace got it.
type namespaceCA struct {
	*authority.Authority
	created time.Time
}

// authorityRecord is the content of a sealed file.
type authorityRecord struct {
	// Namespace is also inside the file, so that the file cannot be used for
	// another namespace.
	Namespace   sandbox.Namespace `json:"namespace"`
	Created     time.Time         `json:"created"`
	Certificate []byte            `json:"certificate"`
	Key         []byte            `json:"key"`
}

func (c namespaceCA) public(n sandbox.Namespace) sandbox.NamespaceCA {
	return sandbox.NamespaceCA{
		Namespace: n, Certificate: string(c.Certificate()), Fingerprint: c.Fingerprint(), Subject: c.Subject(), Names: c.Names(),
		Created: c.created, Expires: c.NotAfter(),
	}
}

// openAuthorities reads the CAs that an earlier daemon has sealed. openSecrets has
// already checked the key.
func openAuthorities(dir string, key *seal.Key) (*authorityStore, error) {
	s := &authorityStore{sealedFolder: sealedFolder{dir, key}, all: map[sandbox.Namespace]namespaceCA{}}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || key == nil {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the CAs of namespaces: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempSecret) { // left by a writer that was killed
			err = os.Remove(filepath.Join(dir, e.Name()))
		} else {
			err = s.load(e.Name())
		}
		if err != nil {
			return nil, fmt.Errorf("open the CA of namespace %s: %w", e.Name(), err)
		}
	}
	return s, nil
}

func (s *authorityStore) load(name string) error {
	b, err := s.read(name)
	if err != nil {
		return err
	}
	var r authorityRecord
	if json.Unmarshal(b, &r) != nil { // the error may contain a part of the key
		return errors.New("it is damaged")
	}
	if string(r.Namespace) != name {
		return errors.New("it is that of another namespace")
	}
	ca, err := authority.Read(r.Certificate, r.Key)
	if err != nil {
		return err
	}
	s.all[r.Namespace] = namespaceCA{ca, r.Created}
	return nil
}

// get returns the CA of a namespace, if it has one.
func (s *authorityStore) get(n sandbox.Namespace) (namespaceCA, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ca, ok := s.all[n]
	return ca, ok
}

// ensure returns the CA of a namespace, and makes it if necessary.
func (s *authorityStore) ensure(n sandbox.Namespace) (namespaceCA, error) {
	if ca, ok := s.get(n); ok {
		return ca, nil
	}
	defer s.turns.lock(sandbox.Key{Namespace: n})()
	if ca, ok := s.get(n); ok { // another call was faster
		return ca, nil
	}
	return s.make(n, sandbox.CASpec{})
}

// set gives a namespace another CA.
func (s *authorityStore) set(n sandbox.Namespace, spec sandbox.CASpec) (namespaceCA, error) {
	defer s.turns.lock(sandbox.Key{Namespace: n})()
	return s.make(n, spec)
}

// make makes or reads a CA, and keeps it. The caller has the turn of the namespace.
func (s *authorityStore) make(n sandbox.Namespace, spec sandbox.CASpec) (out namespaceCA, err error) {
	if s.key == nil {
		return out, sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon keeps no CA").Because("it has no key to seal it with")
	}
	if out, err = newAuthority(n, spec); err != nil {
		return out, err
	}
	key, err := out.PrivateKey()
	if err != nil {
		return out, err
	}
	plain, err := json.Marshal(authorityRecord{Namespace: n, Created: out.created, Certificate: out.Certificate(), Key: key})
	if err != nil {
		return out, fmt.Errorf("write the CA of namespace %s: it cannot be encoded", n)
	}
	sealed, err := s.sealedFolder.key.Seal(plain)
	if err == nil {
		err = s.write(string(n), sealed)
	}
	if err != nil {
		return out, fmt.Errorf("write the CA of namespace %s: %w", n, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[n] = out
	return out, nil
}

func newAuthority(n sandbox.Namespace, spec sandbox.CASpec) (namespaceCA, error) {
	now := time.Now().UTC()
	if spec.Certificate != "" {
		ca, err := authority.Read([]byte(spec.Certificate), []byte(spec.Key))
		if err != nil {
			return namespaceCA{}, sandbox.Invalid("certificate", "%v", err)
		}
		if now.After(ca.NotAfter()) {
			return namespaceCA{}, sandbox.Invalid("certificate", "it was valid until %v", ca.NotAfter())
		}
		return namespaceCA{ca, now}, nil
	}
	var names []policy.Name
	for _, text := range spec.Names {
		name, err := policy.ParseName(text)
		if err != nil {
			return namespaceCA{}, sandbox.Invalid("names", "%v", err)
		}
		names = append(names, name)
	}
	ca, err := authority.New(string(n), names, now)
	return namespaceCA{ca, now}, err
}
