package layer

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
)

// Digest is the SHA-256 of a layer's bytes.
type Digest [sha256.Size]byte

// String is the lower-case hexadecimal form, which is also a file name.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// ParseDigest accepts only the form that String returns, so that each digest
// has one name.
func ParseDigest(s string) (Digest, error) {
	var d Digest
	if len(s) != 2*len(d) {
		return Digest{}, fmt.Errorf("digest %.80q: has %d characters, not %d", s, len(s), 2*len(d))
	}
	for i := range s {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return Digest{}, fmt.Errorf("digest %q: %q is not a lower-case hexadecimal digit", s, c)
		}
	}
	_, err := hex.Decode(d[:], []byte(s))
	return d, err
}

// MarshalText makes a digest a string in JSON.
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText is ParseDigest.
func (d *Digest) UnmarshalText(b []byte) (err error) {
	*d, err = ParseDigest(string(b))
	return err
}

// Ref names one immutable layer file.
type Ref struct {
	Digest Digest
	// Size is a multiple of PageSize, above zero.
	Size uint64
}

func (r Ref) validate() error {
	if r.Size == 0 || r.Size%PageSize != 0 || r.Size > MaxSize {
		return fmt.Errorf("layer %s of %d bytes: must be a multiple of %d, above zero and at most %d", r.Digest, r.Size, PageSize, uint64(MaxSize))
	}
	return nil
}

// Writer writes pages to a layer file and computes its Ref.
type Writer struct {
	w    io.Writer
	hash hash.Hash
	n    uint64
}

// NewWriter starts a layer that goes to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w, hash: sha256.New()} }

// Write hashes and counts the bytes that w has accepted.
func (w *Writer) Write(p []byte) (int, error) {
	n, err := w.w.Write(p)
	w.hash.Write(p[:n])
	w.n += uint64(n)
	return n, err
}

// Ref is the layer written so far. After a failed Write it is not valid.
func (w *Writer) Ref() Ref {
	r := Ref{Size: w.n}
	w.hash.Sum(r.Digest[:0])
	return r
}
