package pack

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"agentrun.dev/internal/storage/image"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
)

func sha(b []byte) [sha256.Size]byte { return sha256.Sum256(b) }

func writeAll(b []byte) func(*os.File) error {
	return func(f *os.File) error {
		_, err := f.WriteAt(b, 0)
		return err
	}
}

// keyFiles makes a key pair as cosign generate-key-pair does.
func keyFiles(t testing.TB, password []byte) (private, public string) {
	t.Helper()
	var ask cryptoutils.PassFunc
	if password != nil {
		ask = func(bool) ([]byte, error) { return password, nil }
	}
	key, pub, err := cryptoutils.GeneratePEMEncodedECDSAKeyPair(elliptic.P256(), ask)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	private, public = filepath.Join(dir, "cosign.key"), filepath.Join(dir, "cosign.pub")
	if err := errors.Join(os.WriteFile(private, key, 0o600), os.WriteFile(public, pub, 0o600)); err != nil {
		t.Fatal(err)
	}
	return private, public
}

func newKeys(t testing.TB) (*Signer, *Verifier) {
	t.Helper()
	private, public := keyFiles(t, nil)
	s, err := LoadSigner(private, nil)
	if err != nil {
		t.Fatal(err)
	}
	v, err := LoadVerifier(public)
	if err != nil {
		t.Fatal(err)
	}
	return s, v
}

// TestKeys: encrypted keys of cosign, and plain keys, can be loaded.
func TestKeys(t *testing.T) {
	private, public := keyFiles(t, []byte("open sesame"))
	b, err := os.ReadFile(private)
	if err != nil || !bytes.HasPrefix(b, []byte("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----")) {
		t.Fatalf("%s, %v", b, err)
	}
	say := func(password string) func() ([]byte, error) {
		return func() ([]byte, error) { return []byte(password), nil }
	}
	signer, err := LoadSigner(private, say("open sesame"))
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := LoadVerifier(public)
	if err != nil {
		t.Fatal(err)
	}
	snap := small(t)
	if _, _, err := unpackInto(t, packed(t, snap, PackOptions{Key: signer}), UnpackOptions{Key: verifier}); err != nil {
		t.Error(err)
	}
	if _, err := LoadSigner(private, say("wrong")); err == nil {
		t.Error("a wrong password was accepted")
	}
	no := errors.New("nobody is here")
	if _, err := LoadSigner(private, func() ([]byte, error) { return nil, no }); !errors.Is(err, no) {
		t.Errorf("without a password: %v", err)
	}
	for _, path := range []string{public, filepath.Join(t.TempDir(), "missing"), t.TempDir(), "/dev/zero"} {
		if _, err := LoadSigner(path, say("")); err == nil {
			t.Errorf("%s became a private key", path)
		}
	}
	for _, path := range []string{private, t.TempDir(), "/dev/zero"} {
		if _, err := LoadVerifier(path); err == nil {
			t.Errorf("%s became a public key", path)
		}
	}
}

// TestSigned: with a key, only a pack that this key has signed is unpacked, by
// file and by registry. A refused pack leaves no files.
func TestSigned(t *testing.T) {
	key, public := newKeys(t)
	another, stranger := newKeys(t)
	snap, unsigned := small(t), makeSnapshot(t, content{size: page, pages: []uint64{0}, seed: 9}, content{size: page, pages: []uint64{0}})
	file := packed(t, snap, PackOptions{Key: key})
	r := newRegistry(t)
	r.push(t, "team/signed:1", snap, PackOptions{Key: key})
	digest := r.push(t, "team/signed:2", unsigned, PackOptions{})

	for _, o := range []UnpackOptions{{}, {Key: public}} {
		got, _, err := unpackInto(t, file, o)
		if err != nil {
			t.Fatal(err)
		}
		wantSame(t, got, snap)
		if got, _, err = r.pull(t, "team/signed:1", o); err != nil {
			t.Fatal(err)
		}
		wantSame(t, got, snap)
	}
	_, parent, err := unpackInto(t, file, UnpackOptions{Key: stranger})
	wantRefused(t, parent, err, ErrUnsigned.Error())
	_, parent, err = r.pull(t, "team/signed:1", UnpackOptions{Key: stranger})
	wantRefused(t, parent, err, ErrUnsigned.Error())
	_, parent, err = unpackInto(t, packed(t, snap, PackOptions{}), UnpackOptions{Key: public})
	wantRefused(t, parent, err, "it has no signature")
	_, parent, err = r.pull(t, "team/signed:2", UnpackOptions{Key: public})
	wantRefused(t, parent, err, "it has no signature")

	// A signature of one pack, stored as that of another.
	repo, err := r.registries().Open(r.ref(t, "team/signed:1"))
	if err != nil {
		t.Fatal(err)
	}
	defer repo.Close()
	raw, desc, err := repo.Get(t.Context(), repo.Tag(signatureTag(describe(manifestOf(t, file)).Digest)))
	if err != nil {
		t.Fatal(err)
	}
	if err := repo.Put(t.Context(), repo.Tag(signatureTag(digest)), raw, desc.MediaType); err != nil {
		t.Fatal(err)
	}
	_, parent, err = r.pull(t, "team/signed:2", UnpackOptions{Key: public})
	wantRefused(t, parent, err, ErrUnsigned.Error(), "the signature is of")

	// A second key's signature does not replace the first. A key that has signed
	// does not sign again.
	r.push(t, "team/signed:1", snap, PackOptions{Key: another})
	r.push(t, "team/signed:1", snap, PackOptions{Key: key})
	raw, _, err = repo.Get(t.Context(), repo.Tag(signatureTag(describe(manifestOf(t, file)).Digest)))
	if err != nil {
		t.Fatal(err)
	}
	if m, err := parseSignatures(raw); err != nil || len(m.Layers) != 2 {
		t.Errorf("%d signatures, %v", len(m.Layers), err)
	}
	for _, k := range []*Verifier{public, stranger} {
		if _, _, err := r.pull(t, "team/signed:1", UnpackOptions{Key: k}); err != nil {
			t.Error(err)
		}
	}
}

func manifestOf(t testing.TB, pack []byte) []byte {
	b := open(t, pack)
	return b.find(blobName(decode[v1.IndexManifest](t, b.find(indexName).content).Manifests[0])).content
}

// TestCosignForm: a signature has the place and the form that cosign expects. The
// test checks it without the code that made it.
func TestCosignForm(t *testing.T) {
	private, public := keyFiles(t, nil)
	key, err := LoadSigner(private, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := newRegistry(t)
	digest := r.push(t, "team/signed:1", small(t), PackOptions{Key: key})
	repo, err := r.registries().Open(r.ref(t, "team/signed:1"))
	if err != nil {
		t.Fatal(err)
	}
	defer repo.Close()
	raw, desc, err := repo.Get(t.Context(), repo.Tag("sha256-"+digest.Hex+".sig"))
	if err != nil {
		t.Fatal(err)
	}
	m := decode[v1.Manifest](t, raw)
	if desc.MediaType != "application/vnd.oci.image.manifest.v1+json" || m.Config.MediaType != "application/vnd.oci.image.config.v1+json" || len(m.Layers) != 1 {
		t.Fatalf("%s", raw)
	}
	l := m.Layers[0]
	if l.MediaType != "application/vnd.dev.cosign.simplesigning.v1+json" {
		t.Errorf("payload of type %s", l.MediaType)
	}
	payload, err := remoteSource{repo, image.NewReporter(nil)}.small(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"critical":{"identity":{"docker-reference":"` + r.host + `/team/signed"},"image":{"docker-manifest-digest":"` + digest.String() +
		`"},"type":"cosign container image signature"},"optional":null}`
	if string(payload) != want {
		t.Errorf("payload %s, want %s", payload, want)
	}
	b, err := os.ReadFile(public)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(b)
	pub, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	sig, err := base64.StdEncoding.DecodeString(l.Annotations["dev.cosignproject.cosign/signature"])
	sum := sha(payload)
	if p, ok := pub.(*ecdsa.PublicKey); err != nil || !ok || !ecdsa.VerifyASN1(p, sum[:], sig) {
		t.Errorf("%x is no signature of it: %v", sig, err)
	}
}

// TestHostileSignatures: each of these signatures is refused.
func TestHostileSignatures(t *testing.T) {
	key, public := newKeys(t)
	good := packed(t, small(t), PackOptions{Key: key})
	for name, edit := range map[string]func(*bundle, *v1.Manifest){
		"no layers":     func(_ *bundle, m *v1.Manifest) { m.Layers = nil },
		"no annotation": func(_ *bundle, m *v1.Manifest) { m.Layers[0].Annotations = nil },
		"no base64":     func(_ *bundle, m *v1.Manifest) { m.Layers[0].Annotations[signatureKey] = "%" },
		"another signature": func(_ *bundle, m *v1.Manifest) {
			m.Layers[0].Annotations[signatureKey] = base64.StdEncoding.EncodeToString([]byte("mine"))
		},
		"another payload": func(b *bundle, m *v1.Manifest) {
			b.replace(&m.Layers[0], swap(t, b.find(blobName(m.Layers[0])).content, "agentrun.dev/snapshot", "agentrun.dev/another"))
		},
		"another type": func(_ *bundle, m *v1.Manifest) { m.Layers[0].MediaType = "text/plain" },
		"huge payload": func(_ *bundle, m *v1.Manifest) { m.Layers[0].Size = 1 << 40 },
		"many": func(_ *bundle, m *v1.Manifest) {
			bad := m.Layers[0]
			bad.Annotations = nil
			real := m.Layers[0]
			m.Layers = nil
			for range maxSignatures {
				m.Layers = append(m.Layers, bad)
			}
			m.Layers = append(m.Layers, real)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t, good)
			b.index(func(i *v1.IndexManifest) {
				d := &i.Manifests[1]
				m := decode[v1.Manifest](t, b.find(blobName(*d)).content)
				old := m.Layers[0]
				edit(b, &m)
				if len(m.Layers) == 0 {
					b.remove(blobName(old)) // an entry that no manifest names is refused for another reason
				}
				b.replace(d, encode(t, m))
			})
			_, parent, err := unpackInto(t, b.bytes(), UnpackOptions{Key: public})
			wantRefused(t, parent, err, ErrUnsigned.Error())
		})
	}
	// Bytes that are not a manifest.
	b := open(t, good)
	b.index(func(i *v1.IndexManifest) { b.replace(&i.Manifests[1], []byte("[")) })
	_, parent, err := unpackInto(t, b.bytes(), UnpackOptions{Key: public})
	wantRefused(t, parent, err, "damaged")
}
