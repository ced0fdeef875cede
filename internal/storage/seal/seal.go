// Package seal encrypts files that hold secrets. The format is age's
// (age-encryption.org/v1): each file has a key of its own, which the node's key
// wraps. The file is authenticated in chunks of 64 KiB, including its end. So it
// can be written and read as a stream, and a truncated or changed file is
// refused. docs/design/secrets.md lists the attacks against which this protects.
package seal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"agentrun.dev/internal/durable"
	"filippo.io/age"
)

// Key is the key of a node. Formatting a Key never reveals it.
type Key struct {
	identity *age.X25519Identity
	name     string // its origin, for errors
}

// ErrKey means that the data was sealed with another key, or is damaged.
var ErrKey = errors.New("it was sealed with another key, or is damaged")

// Generate makes a key that exists only in memory.
func Generate() (*Key, error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	return &Key{identity: id, name: "a key in memory"}, nil
}

// maxKeyFile is far larger than a key with the comments around it.
const maxKeyFile = 16 << 10

// Open reads a key file: an age identity, as age-keygen writes it. Only its owner
// may be able to read the file.
func Open(file string) (*Key, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read the key: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read the key: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("read the key: others may read %s (mode %04o). Run `chmod 600 %s`", file, info.Mode().Perm(), file)
	}
	// The parser's error is not passed on: it could show part of the content,
	// and errors are logged.
	ids, err := age.ParseIdentities(io.LimitReader(f, maxKeyFile))
	if err != nil || len(ids) != 1 {
		return nil, fmt.Errorf("read the key: %s is not one age identity. Make one with `age-keygen -o FILE`, or let AgentRun make it", file)
	}
	id, ok := ids[0].(*age.X25519Identity)
	if !ok {
		return nil, fmt.Errorf("read the key: %s is an age identity of another type than X25519", file)
	}
	return &Key{identity: id, name: file}, nil
}

// OpenOrMake is Open, but makes a key first if the file does not exist. A
// process that is killed meanwhile leaves either a complete key or no file.
func OpenOrMake(file string) (*Key, error) {
	k, err := Open(file)
	if !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	made, err := Generate()
	if err != nil {
		return nil, err
	}
	if err := made.write(file); err != nil {
		return nil, fmt.Errorf("make the key %s: %w", file, err)
	}
	return Open(file)
}

func (k *Key) write(file string) error {
	err := durable.Create(file, 0o600, func(f *os.File) error {
		_, err := fmt.Fprintf(f, "# The key of this node's secrets: docs/design/secrets.md.\n%s\n", k.identity)
		return err
	})
	if errors.Is(err, fs.ErrExist) { // another process was faster: use its key
		return durable.SyncFolder(filepath.Dir(file))
	}
	return err
}

// Writer seals the data that is written to it. The caller must close it: a file
// without its end is refused.
func (k *Key) Writer(w io.Writer) (io.WriteCloser, error) {
	out, err := age.Encrypt(w, k.identity.Recipient())
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	return out, nil
}

// Reader decrypts sealed data. The error wraps ErrKey if it was sealed with
// another key.
func (k *Key) Reader(r io.Reader) (io.Reader, error) {
	in, err := age.Decrypt(r, k.identity)
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", ErrKey, k.name)
	}
	return in, nil
}

// Seal seals a few bytes.
func (k *Key) Seal(plain []byte) ([]byte, error) {
	var out bytes.Buffer
	w, err := k.Writer(&out)
	if err != nil {
		return nil, err
	}
	_, err = w.Write(plain)
	if err = errors.Join(err, w.Close()); err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	return out.Bytes(), nil
}

// Unseal is the reverse of Seal.
func (k *Key) Unseal(sealed []byte) ([]byte, error) {
	r, err := k.Reader(bytes.NewReader(sealed))
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", ErrKey, k.name)
	}
	return b, nil
}

// String returns a fixed text without the key.
func (k *Key) String() string { return "seal.Key{…}" }

// GoString is String, for %#v.
func (k *Key) GoString() string { return k.String() }

// LogValue is String, for logs.
func (k *Key) LogValue() slog.Value { return slog.StringValue(k.String()) }

// MarshalJSON always fails: a key must not appear in an answer or a journal.
func (k *Key) MarshalJSON() ([]byte, error) { return nil, errors.New("a key is not written as JSON") }
