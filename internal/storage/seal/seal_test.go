package seal

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func newKey(t *testing.T) *Key {
	t.Helper()
	k, err := Generate()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestSeal(t *testing.T) {
	k := newKey(t)
	for _, size := range []int{0, 1, 64 << 10, 200_001} {
		plain := make([]byte, size)
		_, _ = rand.Read(plain)
		sealed, err := k.Seal(plain)
		if err != nil {
			t.Fatal(err)
		}
		if size > 1 && bytes.Contains(sealed, plain) { // a single byte may occur by chance
			t.Errorf("%d bytes are in what was sealed", size)
		}
		got, err := k.Unseal(sealed)
		if err != nil || !bytes.Equal(got, plain) {
			t.Errorf("%d bytes came back as %d, %v", size, len(got), err)
		}
		again, err := k.Seal(plain)
		if err != nil || bytes.Equal(again, sealed) {
			t.Errorf("the same is sealed the same way twice, %v", err)
		}
	}
}

// TestDamaged: changing any byte or cutting off the end is noticed.
func TestDamaged(t *testing.T) {
	k := newKey(t)
	plain := bytes.Repeat([]byte("secret "), 20_000)
	sealed, err := k.Seal(plain)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(sealed); i += 997 {
		bad := bytes.Clone(sealed)
		bad[i] ^= 1
		if _, err := k.Unseal(bad); !errors.Is(err, ErrKey) {
			t.Fatalf("byte %d was changed: %v", i, err)
		}
		if _, err := k.Unseal(sealed[:i]); !errors.Is(err, ErrKey) {
			t.Fatalf("cut off at %d: %v", i, err)
		}
	}
	if _, err := k.Unseal(append(bytes.Clone(sealed), 0)); !errors.Is(err, ErrKey) {
		t.Errorf("a byte was appended: %v", err)
	}
	if _, err := newKey(t).Unseal(sealed); !errors.Is(err, ErrKey) {
		t.Errorf("another key: %v", err)
	}
	// Data of a writer that was not closed is refused.
	var out bytes.Buffer
	w, err := k.Writer(&out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	r, err := k.Reader(&out)
	if err == nil {
		_, err = io.Copy(io.Discard, r)
	}
	if err == nil {
		t.Error("what has no end was read")
	}
}

func TestKeyFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	if _, err := Open(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open what is not there: %v", err)
	}
	k, err := OpenOrMake(file)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	sealed, err := k.Seal([]byte("kept"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := OpenOrMake(file)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := again.Unseal(sealed); err != nil || string(got) != "kept" {
		t.Errorf("%q, %v", got, err)
	}
	if list, err := os.ReadDir(filepath.Dir(file)); err != nil || len(list) != 1 {
		t.Errorf("beside the key: %v, %v", list, err)
	}
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenOrMake(file); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a key that others may read: %v", err)
	}
	for _, content := range []string{"", "AGE-SECRET-KEY-1NOTAKEY", "hunter2\n"} {
		bad := filepath.Join(t.TempDir(), "bad")
		if err := os.WriteFile(bad, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := OpenOrMake(bad)
		if err == nil || content != "" && strings.Contains(err.Error(), strings.TrimSpace(content)) {
			t.Errorf("%q: %v", content, err)
		}
	}
}

// TestHidden: no way of printing a key reveals it.
func TestHidden(t *testing.T) {
	k := newKey(t)
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "key", k, "in", struct{ K *Key }{k})
	_, jsonErr := json.Marshal(struct{ K *Key }{k})
	if jsonErr == nil {
		t.Error("a key became JSON")
	}
	shown := fmt.Sprintf("%v %+v %#v %s", k, k, k, k) + log.String()
	if secret := k.identity.String(); strings.Contains(shown, secret) || strings.Contains(shown, "AGE-SECRET") {
		t.Errorf("shown: %s", shown)
	}
}

// FuzzReader: any bytes on disk are either refused or decrypt to the text that
// was sealed.
func FuzzReader(f *testing.F) {
	k, err := Generate()
	if err != nil {
		f.Fatal(err)
	}
	sealed, err := k.Seal([]byte("plain"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(sealed)
	f.Add([]byte("age-encryption.org/v1\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, err := k.Unseal(b); err == nil && !bytes.Equal(b, sealed) {
			t.Errorf("%q came from what nobody sealed", got)
		}
	})
}

// BenchmarkWriter measures sealing beside the hash that every layer needs
// anyway.
func BenchmarkWriter(b *testing.B) {
	chunk := make([]byte, 1<<20)
	_, _ = rand.Read(chunk)
	k, err := Generate()
	if err != nil {
		b.Fatal(err)
	}
	w, err := k.Writer(io.Discard)
	if err != nil {
		b.Fatal(err)
	}
	for name, to := range map[string]io.Writer{"seal": w, "sha256": sha256.New()} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(chunk)))
			for b.Loop() {
				if _, err := to.Write(chunk); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
