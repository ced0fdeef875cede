package access

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"agentrun.dev/internal/durable"
)

// Lifetimes of the certificates that a node makes itself. Clients trust the
// authority, so they do not notice a new certificate every few weeks.
const (
	authorityLife    = 10 * 365 * 24 * time.Hour
	authorityRenewal = 30 * 24 * time.Hour
	certificateLife  = 30 * 24 * time.Hour
	renewal          = 10 * 24 * time.Hour // before its end
	backdated        = time.Hour           // for clocks that are behind
)

// Authority signs the certificate of a node that was not given one. The
// authority's certificate and key are in one file, so that both exist or
// neither.
type Authority struct {
	// File is a copy of the certificate, for clients: with it they can tell the
	// node from others.
	File string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// OpenAuthority reads the authority in a folder. It makes a new one if none
// exists or if it is about to expire.
func OpenAuthority(dir string) (*Authority, error) {
	a := &Authority{File: filepath.Join(dir, "ca.pem")}
	whole := filepath.Join(dir, "authority.pem")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the certificate authority: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(whole, whole)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = a.make(whole)
	case err == nil && time.Until(pair.Leaf.NotAfter) < authorityRenewal:
		err = a.make(whole)
	case err == nil:
		var ok bool
		if a.key, ok = pair.PrivateKey.(*ecdsa.PrivateKey); !ok {
			err = errors.New("its key is not an ECDSA key")
		}
		a.cert = pair.Leaf
	}
	if err == nil {
		err = writePEM(a.File, 0o644, &pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
	}
	if err != nil {
		return nil, fmt.Errorf("open the certificate authority: %w. If %s is damaged, delete it to have a new one made; clients need its certificate then", err, whole)
	}
	return a, nil
}

func (a *Authority) make(file string) error {
	err := func() (err error) {
		if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			return err
		}
		host, err := os.Hostname()
		if err != nil {
			return err
		}
		der, err := sign(&x509.Certificate{
			Subject:  pkix.Name{Organization: []string{"AgentRun"}, CommonName: "AgentRun node " + host},
			NotAfter: time.Now().Add(authorityLife), IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
			KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		}, nil, a.key, a.key)
		if err != nil {
			return err
		}
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			return err
		}
		private, err := x509.MarshalPKCS8PrivateKey(a.key)
		if err != nil {
			return err
		}
		return writePEM(file, 0o600, &pem.Block{Type: "PRIVATE KEY", Bytes: private}, &pem.Block{Type: "CERTIFICATE", Bytes: der})
	}()
	if err != nil {
		return fmt.Errorf("make a certificate authority: %w", err)
	}
	return nil
}

// sign makes a certificate; a certificate without a parent signs itself.
func sign(c, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	c.SerialNumber, c.NotBefore = serial, time.Now().Add(-backdated)
	if parent == nil {
		parent = c
	}
	return x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
}

func writePEM(path string, mode os.FileMode, blocks ...*pem.Block) error {
	return durable.Replace(path, mode, func(f *os.File) (err error) {
		for _, b := range blocks {
			err = errors.Join(err, pem.Encode(f, b))
		}
		return err
	})
}

// Fingerprint is the SHA-256 of the authority's certificate.
func (a *Authority) Fingerprint() string {
	sum := sha256.Sum256(a.cert.Raw)
	return hex.EncodeToString(sum[:])
}

// Server makes the TLS settings of a server that clients reach by these host
// names and addresses. Its certificate is made now, and again before it
// expires; it is not stored.
func (a *Authority) Server(hosts []string) (*tls.Config, error) {
	names := &x509.Certificate{Subject: pkix.Name{Organization: []string{"AgentRun"}, CommonName: "AgentRun node"}}
	addHosts(names, hosts)
	var mu sync.Mutex // protects current
	var current *tls.Certificate
	get := func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		if current != nil && time.Until(current.Leaf.NotAfter) > renewal {
			return current, nil
		}
		fresh, err := a.issue(*names, certificateLife, x509.ExtKeyUsageServerAuth)
		if err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
		current = fresh
		return current, nil
	}
	if _, err := get(nil); err != nil {
		return nil, err
	}
	return serverConfig(get), nil
}

func addHosts(c *x509.Certificate, hosts []string) {
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, h)
		}
	}
}

func (a *Authority) issue(c x509.Certificate, life time.Duration, use ...x509.ExtKeyUsage) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	c.NotAfter = time.Now().Add(life)
	if c.NotAfter.After(a.cert.NotAfter) {
		c.NotAfter = a.cert.NotAfter
	}
	c.KeyUsage, c.ExtKeyUsage = x509.KeyUsageDigitalSignature, use
	der, err := sign(&c, a.cert, key, a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// Given makes the TLS settings of a server from the files of a certificate and
// its key. It reads them again when the certificate's file has changed. While
// the new files are unusable, it calls failed and goes on with the previous
// certificate.
func Given(certFile, keyFile string, failed func(error)) (*tls.Config, error) {
	if err := checkKeyMode(keyFile); err != nil {
		return nil, err
	}
	var mu sync.Mutex // protects all following variables
	var current *tls.Certificate
	var changed time.Time
	load := func() error {
		info, err := os.Stat(certFile)
		if err != nil || current != nil && info.ModTime().Equal(changed) {
			return err
		}
		pair, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err == nil {
			current, changed = &pair, info.ModTime()
		}
		return err
	}
	if err := load(); err != nil {
		return nil, fmt.Errorf("read the TLS certificate: %w", err)
	}
	return serverConfig(func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		if err := load(); err != nil {
			failed(fmt.Errorf("read the TLS certificate again: %w", err))
		}
		return current, nil
	}), nil
}

// serverConfig is the same for all certificates. It offers only HTTP/1.1,
// because the bounds for slow clients are tested with that.
func serverConfig(get func(*tls.ClientHelloInfo) (*tls.Certificate, error)) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: get, NextProtos: []string{"http/1.1"}}
}

// Hosts returns the names and addresses by which clients reach a server: the
// loopback's, the advertised one, and the listener's. For a listener on all
// addresses these are the host name and all addresses of this machine.
func Hosts(listen net.Addr, advertise string) ([]string, error) {
	hosts := []string{"localhost", "127.0.0.1", "::1"}
	add := func(h string) {
		if h != "" && !slices.Contains(hosts, h) {
			hosts = append(hosts, h)
		}
	}
	if strings.ContainsAny(advertise, "/ ") {
		return nil, fmt.Errorf("%q is not what others reach this node by: write a host or HOST:PORT, without a scheme", advertise)
	}
	if host, _, err := net.SplitHostPort(advertise); err == nil {
		advertise = host
	}
	add(advertise)
	tcp, ok := listen.(*net.TCPAddr)
	if !ok {
		return nil, fmt.Errorf("%s is not a TCP address", listen)
	}
	if !tcp.IP.IsUnspecified() {
		add(tcp.IP.String())
		return hosts, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	add(name)
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("find the addresses of this machine: %w", err)
	}
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLinkLocalUnicast() {
			add(n.IP.String())
		}
	}
	return hosts, nil
}
