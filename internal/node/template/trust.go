package template

import (
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // OpenSSL names files by it; nothing is protected by it.
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"strings"

	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/sandbox"
)

// bundles are the files from which programs read the certificates of CAs: on Debian,
// Ubuntu, Arch and Alpine, Red Hat, SUSE, and of OpenSSL itself. Some are links to others.
var bundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",
	"/etc/pki/tls/certs/ca-bundle.crt",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"/etc/ssl/ca-bundle.pem",
	"/etc/ssl/cert.pem",
	"/usr/lib/ssl/cert.pem",
}

// sources are folders from which update-ca-certificates and update-ca-trust make the bundles.
var sources = []string{"/usr/local/share/ca-certificates", "/etc/pki/ca-trust/source/anchors"}

const (
	// caFile contains only the CA.
	caFile = "/etc/agentrun/ca.crt"
	// hashed is the folder in which OpenSSL finds certificates by the hash of their subject.
	hashed = "/etc/ssl/certs"

	maxBundle = 4 << 20
)

// trust makes programs trust a CA. It returns the environment with variables for programs
// that bring certificates of their own.
func (r *run) trust(ctx context.Context, ca []byte, env sandbox.Env) (sandbox.Env, error) {
	fail := func(err error) (sandbox.Env, error) {
		return env, fmt.Errorf("have the sandbox trust the CA of its namespace: %w", err)
	}
	say(r.log, "trust the CA of the namespace")
	bundle, err := r.addToBundles(ctx, ca)
	if err != nil {
		return fail(err)
	}
	if err := r.write(ctx, caFile, ca); err != nil {
		return fail(err)
	}
	for _, dir := range sources {
		// Debian's folder exists only once it is used.
		if there, err := r.exists(ctx, dir); err != nil {
			return fail(err)
		} else if there || dir == sources[0] {
			if err := r.write(ctx, path.Join(dir, "agentrun-namespace.crt"), ca); err != nil {
				return fail(err)
			}
		}
	}
	if err := r.linkByHash(ctx, ca); err != nil {
		return fail(err)
	}
	out := maps.Clone(env)
	for name, value := range map[string]string{"SSL_CERT_FILE": bundle, "REQUESTS_CA_BUNDLE": bundle, "NODE_EXTRA_CA_CERTS": caFile} {
		if _, set := out[name]; !set {
			out[name] = value
		}
	}
	if err := r.agent.SetEnv(ctx, guestrpc.SetEnvRequest{Env: out.Strings()}); err != nil {
		return fail(err)
	}
	return out, nil
}

// addToBundles adds a CA to every bundle that exists, and returns the first of them.
func (r *run) addToBundles(ctx context.Context, ca []byte) (first string, err error) {
	for _, file := range bundles {
		if there, err := r.exists(ctx, file); err != nil {
			return "", err
		} else if !there {
			continue
		}
		have, err := r.agent.ReadFile(ctx, guestrpc.ReadRequest{Path: r.root + file}, maxBundle)
		if err != nil {
			return "", fmt.Errorf("read %s: %w", file, err)
		}
		if !bytes.Contains(have, bytes.TrimSpace(ca)) {
			if len(have) > 0 && have[len(have)-1] != '\n' {
				have = append(have, '\n')
			}
			if err := r.write(ctx, file, append(have, ca...)); err != nil {
				return "", err
			}
		}
		if first == "" {
			first = file
		}
	}
	if first == "" {
		return "", fmt.Errorf("the image has none of the files with certificates that are known (%s). Install ca-certificates in an init command, or in the image", strings.Join(bundles, ", "))
	}
	return first, nil
}

// linkByHash makes OpenSSL find a CA in its folder.
func (r *run) linkByHash(ctx context.Context, ca []byte) error {
	there, err := r.exists(ctx, hashed)
	if err != nil || !there {
		return err
	}
	hash, err := subjectHash(ca)
	if err != nil {
		return err
	}
	const most = 10 // certificates of one subject
	for n := range most {
		link := path.Join(hashed, fmt.Sprintf("%08x.%d", hash, n))
		err = r.agent.Symlink(ctx, guestrpc.SymlinkRequest{Target: caFile, Path: r.root + link})
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return fmt.Errorf("link it in %s: %w", hashed, err)
}

// subjectHash is the hash in OpenSSL's name for the file of a certificate: SHA-1 of the
// subject in a canonical form (X509_NAME_hash).
func subjectHash(ca []byte) (uint32, error) {
	block, _ := pem.Decode(ca)
	if block == nil {
		return 0, errors.New("the CA is not in PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return 0, fmt.Errorf("the CA: %w", err)
	}
	var subject pkix.RDNSequence
	if _, err := asn1.Unmarshal(cert.RawSubject, &subject); err != nil {
		return 0, fmt.Errorf("the CA's subject: %w", err)
	}
	var canonical []byte
	for _, set := range subject {
		var encoded []byte
		for _, a := range set {
			text, ok := a.Value.(string)
			if !ok {
				return 0, fmt.Errorf("the CA's subject has a value that is no text: %v", a.Type)
			}
			one, err := asn1.Marshal(struct {
				Type  asn1.ObjectIdentifier
				Value string `asn1:"utf8"`
			}{a.Type, lowered(text)})
			if err != nil {
				return 0, fmt.Errorf("the CA's subject: %w", err)
			}
			encoded = append(encoded, one...)
		}
		one, err := asn1.Marshal(asn1.RawValue{Class: asn1.ClassUniversal, Tag: asn1.TagSet, IsCompound: true, Bytes: encoded})
		if err != nil {
			return 0, fmt.Errorf("the CA's subject: %w", err)
		}
		canonical = append(canonical, one...)
	}
	sum := sha1.Sum(canonical) //nolint:gosec // as above
	return binary.LittleEndian.Uint32(sum[:4]), nil
}

// lowered is text in OpenSSL's canonical form: ASCII letters in lower case, and single spaces.
func lowered(text string) string {
	lower := strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r - 'A' + 'a'
		}
		return r
	}, text)
	return strings.Join(strings.Fields(lower), " ")
}

func (r *run) write(ctx context.Context, file string, text []byte) error {
	if _, err := r.agent.WriteFile(ctx, guestrpc.WriteRequest{Path: r.root + file, Perm: 0o644, Parents: true}, bytes.NewReader(text)); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	return nil
}

func (r *run) exists(ctx context.Context, file string) (bool, error) {
	_, err := r.agent.Stat(ctx, guestrpc.StatRequest{Path: r.root + file, Follow: true})
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
