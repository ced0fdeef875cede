package pack

import (
	"bytes"
	"context"
	"crypto"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"github.com/sigstore/sigstore/pkg/signature/payload"
)

// payloadType is the media type by which cosign stores signatures: as an image
// whose layers are the signed payloads.
const payloadType types.MediaType = "application/vnd.dev.cosign.simplesigning.v1+json"

const (
	signatureKey = "dev.cosignproject.cosign/signature"

	maxSignatures = 64
	maxPayload    = 64 << 10
	maxKeyFile    = 64 << 10
	// fileIdentity is the identity in the signature of a file, which is in no
	// registry.
	fileIdentity = "agentrun.dev/snapshot"
)

// ErrUnsigned says that the pack has no valid signature of the expected key.
var ErrUnsigned = errors.New("the pack is not signed with this key")

// Signer signs packs.
type Signer struct{ signer signature.Signer }

// LoadSigner reads a private key in PEM: an encrypted one of cosign, or a plain
// one. It calls password only for an encrypted key.
func LoadSigner(path string, password func() ([]byte, error)) (*Signer, error) {
	b, err := readKey(path)
	if err != nil {
		return nil, fmt.Errorf("signing key: %w", err)
	}
	key, err := cryptoutils.UnmarshalPEMToPrivateKey(b, func(bool) ([]byte, error) { return password() })
	var s signature.Signer
	if err == nil {
		s, err = signature.LoadSigner(key, crypto.SHA256)
	}
	if err != nil {
		return nil, fmt.Errorf("signing key %s: %w (cosign generate-key-pair makes one)", path, err)
	}
	return &Signer{s}, nil
}

// verifier returns the Verifier of the signer's own signatures.
func (s *Signer) verifier() (*Verifier, error) {
	key, err := s.signer.PublicKey()
	if err != nil {
		return nil, err
	}
	v, err := signature.LoadVerifier(key, crypto.SHA256)
	return &Verifier{v}, err
}

// Verifier checks signatures of packs.
type Verifier struct{ verifier signature.Verifier }

// LoadVerifier reads a public key in PEM.
func LoadVerifier(path string) (*Verifier, error) {
	b, err := readKey(path)
	if err != nil {
		return nil, fmt.Errorf("public key: %w", err)
	}
	key, err := cryptoutils.UnmarshalPEMToPublicKey(b)
	var v signature.Verifier
	if err == nil {
		v, err = signature.LoadVerifier(key, crypto.SHA256)
	}
	if err != nil {
		return nil, fmt.Errorf("public key %s: %w", path, err)
	}
	return &Verifier{v}, nil
}

func readKey(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxKeyFile {
		return nil, fmt.Errorf("%s is no file with a key", path)
	}
	return os.ReadFile(path)
}

// emptySignatures is the image without signatures, to which sign adds.
func emptySignatures() v1.Image {
	return mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
}

// sign adds the signature of a manifest to the existing ones.
func (s *Signer) sign(to v1.Image, identity string, manifest v1.Hash) (v1.Image, error) {
	ref, err := name.NewDigest(identity + "@" + manifest.String())
	if err != nil {
		return nil, err
	}
	claim, err := json.Marshal(payload.Cosign{Image: ref, ClaimedIdentity: identity})
	if err != nil {
		return nil, err
	}
	sig, err := s.signer.SignMessage(bytes.NewReader(claim))
	if err != nil {
		return nil, err
	}
	return mutate.Append(to, mutate.Addendum{
		Layer:       static.NewLayer(claim, payloadType),
		Annotations: map[string]string{signatureKey: base64.StdEncoding.EncodeToString(sig)},
	})
}

// check refuses a pack that has no valid signature of this key. Signatures of
// other keys do not matter.
func (v *Verifier) check(ctx context.Context, src source, manifest v1.Hash) error {
	raw, err := src.signatures(ctx, manifest)
	if err != nil {
		return fmt.Errorf("signatures: %w", err)
	}
	if raw == nil {
		return fmt.Errorf("%w: it has no signature", ErrUnsigned)
	}
	m, err := parseSignatures(raw)
	if err != nil {
		return err
	}
	why := errors.New("it has no signature")
	for i, d := range m.Layers {
		if i == maxSignatures {
			break
		}
		if why = v.checkOne(ctx, src, d, manifest); why == nil {
			return nil
		}
	}
	return fmt.Errorf("%w: %w", ErrUnsigned, why)
}

// parseSignatures reads the manifest of an image with signatures.
func parseSignatures(raw []byte) (m v1.Manifest, err error) {
	if len(raw) > maxManifest {
		return m, fmt.Errorf("signatures: more than %d bytes", maxManifest)
	}
	if err := json.Unmarshal(raw, &m); err != nil {
		return m, fmt.Errorf("signatures: damaged: %w", err)
	}
	return m, nil
}

func (v *Verifier) checkOne(ctx context.Context, src source, d v1.Descriptor, manifest v1.Hash) error {
	sig, err := base64.StdEncoding.DecodeString(d.Annotations[signatureKey])
	if err != nil {
		return err
	}
	d.Annotations = nil
	if err := plain(d, payloadType, maxPayload); err != nil {
		return err
	}
	claim, err := src.small(ctx, d)
	if err != nil {
		return err
	}
	if err := v.verifier.VerifySignature(bytes.NewReader(sig), bytes.NewReader(claim)); err != nil {
		return err
	}
	// This key has signed the payload. The payload must also name this
	// manifest.
	var c payload.SimpleContainerImage
	if err := json.Unmarshal(claim, &c); err != nil {
		return err
	}
	if c.Critical.Type != payload.CosignSignatureType || c.Critical.Image.DockerManifestDigest != manifest.String() {
		return fmt.Errorf("the signature is of %.80q, not of %s", c.Critical.Image.DockerManifestDigest, manifest)
	}
	return nil
}
