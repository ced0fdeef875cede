package world

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net/http"
	"testing"
	"time"
)

// authority signs the certificates of the world's servers.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

const validity = 24 * time.Hour

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "The authority of a test"},
		NotBefore: time.Now().Add(-validity), NotAfter: time.Now().Add(validity),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &authority{cert, key}, err
}

// Authority returns the certificate that clients must trust, in PEM.
func (w *World) Authority() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.authority.cert.Raw})
}

// Certificate makes a certificate for the names.
func (w *World) Certificate(t testing.TB, names ...string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: names[0]}, DNSNames: names,
		NotBefore: time.Now().Add(-validity), NotAfter: time.Now().Add(validity),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, w.authority.cert, &key.PublicKey, w.authority.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// quiet is the log of servers whose clients are meant to break off.
var quiet = log.New(io.Discard, "", 0)

// ServeHTTP serves a handler on an address of the servers.
func (w *World) ServeHTTP(t testing.TB, address string, h http.Handler) {
	t.Helper()
	w.serve(t, address, &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: quiet}, false)
}

// ServeHTTPS serves a handler with a certificate for the names, over HTTP/1.1 and
// HTTP/2.
func (w *World) ServeHTTPS(t testing.TB, address string, h http.Handler, names ...string) {
	t.Helper()
	w.serve(t, address, &http.Server{
		Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: quiet,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{w.Certificate(t, names...)}, MinVersion: tls.VersionTLS12},
	}, true)
}

func (w *World) serve(t testing.TB, address string, s *http.Server, secure bool) {
	t.Helper()
	l := w.Listen(t, address)
	served := make(chan error, 1)
	go func() {
		if secure {
			served <- s.ServeTLS(l, "", "")
		} else {
			served <- s.Serve(l)
		}
	}()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(fmt.Errorf("close the server on %s: %w", address, err))
		}
		<-served
	})
}
