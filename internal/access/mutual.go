package access

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"agentrun.dev/internal/sandbox"
	"golang.org/x/sys/unix"
)

// LookEvery is how often to look at the files of certificates. They may be links that
// are replaced, as in Kubernetes, and no event reports that.
const LookEvery = 2 * time.Second

// maxPEM is the length of the longest file of certificates.
const maxPEM = 1 << 20

// MutualFiles are the files of one end of mutual TLS, all in PEM: its certificate,
// the key of the certificate, and the CAs that may have signed the other end's
// certificate.
type MutualFiles struct{ Cert, Key, CA string }

func (f MutualFiles) list() [3]string { return [3]string{f.Cert, f.Key, f.CA} }

// Mutual is one end of mutual TLS. It follows its files as long as Look is called. Only
// one goroutine at a time may call Look; all other methods are safe for concurrent use.
type Mutual struct {
	files MutualFiles
	now   atomic.Pointer[Material]
	// loaded is the state of the files in use, refused that of files that were unusable,
	// last that at the last call of Look.
	loaded, refused, last stamps
}

// Material is the content of the files at one moment.
type Material struct {
	certificate tls.Certificate
	roots       *x509.CertPool
}

// stamp tells a file from a previous one at the same path.
type stamp struct {
	dev, ino uint64
	size     int64
	modified unix.Timespec
	changed  unix.Timespec
}

type stamps [3]stamp

// noStamps differs from every state of files, even from that of missing files.
var noStamps = stamps{{size: -1}}

// OpenMutual reads the files.
func OpenMutual(files MutualFiles) (*Mutual, error) {
	m := &Mutual{files: files}
	now, err := m.stamps()
	if err != nil {
		return nil, err
	}
	material, err := files.read()
	if err != nil {
		return nil, err
	}
	m.loaded, m.refused, m.last = now, noStamps, now
	m.now.Store(material)
	return m, nil
}

// Now returns the content of the files when they were last read without an
// error.
func (m *Mutual) Now() *Material { return m.now.Load() }

// Look reads the files again if they have changed since they were read. It uses all
// three new files or none of them: while one is unusable, the previous content stays
// in use, and the error is returned once. Another program may be writing the files,
// and half of a file of CAs may be a valid one. So Look reads files only if they are
// as they were at the call before.
func (m *Mutual) Look() (changed bool, err error) {
	now, err := m.stamps()
	if err != nil {
		now = stamps{} // a missing file is a state as well
	}
	settled := now == m.last
	m.last = now
	if !settled || now == m.loaded || now == m.refused {
		return false, nil
	}
	var material *Material
	if err == nil {
		material, err = m.files.read()
	}
	if err != nil {
		m.refused = now
		return false, err
	}
	m.loaded, m.refused = now, noStamps
	m.now.Store(material)
	return true, nil
}

func (m *Mutual) stamps() (out stamps, err error) {
	for i, path := range m.files.list() {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return stamps{}, &os.PathError{Op: "read", Path: path, Err: err}
		}
		out[i] = stamp{dev: st.Dev, ino: st.Ino, size: st.Size, modified: st.Mtim, changed: st.Ctim}
	}
	return out, nil
}

// read reads the files.
func (f MutualFiles) read() (*Material, error) {
	if err := checkKeyMode(f.Key); err != nil {
		return nil, err
	}
	var texts [3][]byte
	for i, path := range f.list() {
		var err error
		if texts[i], err = readPEM(path); err != nil {
			return nil, err
		}
	}
	pair, err := tls.X509KeyPair(texts[0], texts[1])
	if err != nil {
		return nil, fmt.Errorf("read the certificate %s and its key: %w", f.Cert, err)
	}
	roots, err := parseCAs(texts[2])
	if err != nil {
		return nil, fmt.Errorf("read the CAs in %s: %w", f.CA, err)
	}
	return &Material{certificate: pair, roots: roots}, nil
}

func readPEM(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxPEM+1))
	if err == nil && len(text) > maxPEM {
		err = fmt.Errorf("read %s: it has more than %d bytes", path, maxPEM)
	}
	return text, errors.Join(err, f.Close())
}

// checkKeyMode refuses a key that all users can read.
func checkKeyMode(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("read the TLS key: %w", err)
	}
	if mode := info.Mode().Perm(); mode&0o007 != 0 {
		return fmt.Errorf("read the TLS key: everybody may read %s (mode %04o). Run `chmod o= %s`", path, mode, path)
	}
	return nil
}

// parseCAs reads certificates of CAs. Unlike x509.CertPool it skips nothing.
func parseCAs(text []byte) (*x509.CertPool, error) {
	const begin = "-----BEGIN"
	roots, found, begun := x509.NewCertPool(), 0, bytes.Count(text, []byte(begin))
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("it has a block %s beside certificates", sandbox.Quote(block.Type))
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		if !cert.IsCA {
			return nil, fmt.Errorf("the certificate of %s is not that of a CA", sandbox.Quote(cert.Subject.String()))
		}
		roots.AddCert(cert)
		found, text = found+1, rest
	}
	switch {
	case found != begun: // pem skips blocks that it cannot decode
		return nil, errors.New("a certificate in it is damaged or cut off")
	case found == 0:
		return nil, errors.New("it has no certificate")
	}
	return roots, nil
}

// protocol is the protocol that both ends speak over mutual TLS (ALPN).
const protocol = "h2"

// Server makes the TLS settings for a connection whose client has to show a
// component's certificate.
func (m *Material) Server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{protocol},
		Certificates: []tls.Certificate{m.certificate},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: m.roots,
		// A resumed session would bring a certificate that has not been verified
		// again since.
		SessionTicketsDisabled: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if s.NegotiatedProtocol != protocol {
				return errors.New("the client does not ask for HTTP/2 (ALPN h2)")
			}
			_, err := ClientOf(s)
			return err
		},
	}
}

// ClientOf returns the component at the other end of a connection to a server.
func ClientOf(s tls.ConnectionState) (Component, error) {
	if len(s.VerifiedChains) == 0 {
		return Component{}, sandbox.Errorf(CodeUnauthenticated, "the client has shown no certificate")
	}
	leaf := s.PeerCertificates[0]
	// A certificate without any extended key usage would be accepted for all.
	if !slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageClientAuth) {
		return Component{}, sandbox.Errorf(CodeUnauthenticated, "the certificate is not for clients").Because("its extended key usage has no clientAuth")
	}
	return ComponentOf(leaf)
}

// Client makes the TLS settings of a client. With the name of a node, the server has
// to show that node's certificate, whatever its address. Without a name, it has to
// show one for the host.
func (m *Material) Client(node string) *tls.Config {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{m.certificate}, RootCAs: m.roots}
	if node == "" {
		return cfg
	}
	// VerifyConnection verifies everything except the host, and the node's name
	// instead.
	cfg.InsecureSkipVerify = true
	cfg.VerifyConnection = func(s tls.ConnectionState) error {
		if _, err := m.verify(s.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
			return err
		}
		c, err := ComponentOf(s.PeerCertificates[0])
		if err == nil && c != (Component{Role: RoleNode, Name: node}) {
			err = fmt.Errorf("the server is %s, not node:%s", c, node)
		}
		return err
	}
	return cfg
}

// Verify checks a client's certificates, the leaf first, against these CAs. They are
// valid until the first certificate in the chain expires; of several chains the longest
// valid one counts.
func (m *Material) Verify(certs []*x509.Certificate) (until time.Time, err error) {
	return m.verify(certs, x509.ExtKeyUsageClientAuth)
}

func (m *Material) verify(certs []*x509.Certificate, use x509.ExtKeyUsage) (until time.Time, err error) {
	if len(certs) == 0 {
		return until, errors.New("no certificate was shown")
	}
	between := x509.NewCertPool()
	for _, c := range certs[1:] {
		between.AddCert(c)
	}
	chains, err := certs[0].Verify(x509.VerifyOptions{Roots: m.roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{use}})
	if err != nil {
		return until, err
	}
	for _, chain := range chains {
		first := chain[0].NotAfter
		for _, c := range chain[1:] {
			if c.NotAfter.Before(first) {
				first = c.NotAfter
			}
		}
		if first.After(until) {
			until = first
		}
	}
	return until, nil
}
