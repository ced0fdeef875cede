package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"

	"agentrun.dev/internal/storage/layer"
)

// file is the content of manifest.json. The folder does not contain the
// snapshot's id, so a checksum shows whether a manifest was damaged.
type file struct {
	Manifest
	// Checksum is the SHA-256 of the same file with a checksum of zeros.
	Checksum layer.Digest `json:"checksum"`
}

// encode returns the canonical form of a manifest.
func encode(m Manifest) ([]byte, error) {
	if err := m.Validate(); err != nil {
		return nil, fmt.Errorf("manifest: %w", err)
	}
	return checksummed(m)
}

// checksummed encodes and adds the checksum.
func checksummed(m Manifest) ([]byte, error) {
	b, err := marshal(file{Manifest: m})
	if err != nil {
		return nil, err
	}
	if b, err = marshal(file{m, sha256.Sum256(b)}); err != nil {
		return nil, err
	}
	if len(b) > MaxManifest {
		return nil, fmt.Errorf("manifest: %d bytes are more than %d: use fewer labels or disks", len(b), MaxManifest)
	}
	return b, nil
}

func marshal(f file) ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(f); err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return out.Bytes(), nil
}

// ParseManifest reads the bytes of a manifest.json from elsewhere. It accepts
// only the canonical form, so that a snapshot made from the result has the same
// id.
func ParseManifest(b []byte) (Manifest, error) { return decode(b) }

// Encode returns the bytes of manifest.json, whose SHA-256 is the snapshot's
// id.
func (m Manifest) Encode() ([]byte, error) { return encode(m) }

// decode accepts exactly the output of encode.
func decode(b []byte) (Manifest, error) {
	if len(b) > MaxManifest {
		return Manifest{}, fmt.Errorf("more than %d bytes", MaxManifest)
	}
	// Another version may have other fields, so its number is checked first.
	var origin struct {
		Format int    `json:"format"`
		Engine string `json:"engine"`
	}
	if err := json.Unmarshal(b, &origin); err != nil {
		return Manifest{}, fmt.Errorf("damaged: %w", err)
	}
	if err := checkOrigin(origin.Format, origin.Engine); err != nil {
		return Manifest{}, err
	}
	var f file
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return Manifest{}, fmt.Errorf("damaged: %w", err)
	}
	// This also refuses forms that the decoder tolerates: other spellings of
	// field names, duplicate fields, another order, spaces.
	again, err := marshal(f)
	if err != nil {
		return Manifest{}, err
	}
	if !bytes.Equal(again, b) {
		return Manifest{}, errors.New("damaged: it is not in canonical form")
	}
	sealed, err := checksummed(f.Manifest)
	if err != nil {
		return Manifest{}, err
	}
	if !bytes.Equal(sealed, b) {
		return Manifest{}, errors.New("damaged: its checksum is wrong")
	}
	return f.Manifest, f.Validate()
}
