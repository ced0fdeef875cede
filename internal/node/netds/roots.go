package netds

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"
)

// systemRoots are the usual files with the certificates of CAs: on Debian, Ubuntu, Arch and
// Alpine, Red Hat, SUSE. The first that exists is used.
var systemRoots = []string{
	"/etc/ssl/certs/ca-certificates.crt",
	"/etc/pki/tls/certs/ca-bundle.crt",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"/etc/ssl/ca-bundle.pem",
	"/etc/ssl/cert.pem",
}

// maxRoots is the largest file that a netd accepts.
const maxRoots = 1 << 20

// rootsFile is a file of CA certificates. It is read again when it has changed.
type rootsFile struct {
	path    string
	changed time.Time
	size    int64
	text    []byte
}

// read returns the content of the file, or of the host's file if path is empty. It returns no
// certificates if the host has no file: then no secret is sent anywhere.
func (r *rootsFile) read(path string) ([]byte, error) {
	if path != "" {
		text, err := r.file(path)
		if err != nil {
			return nil, fmt.Errorf("injectRoots: %w", err)
		}
		return text, nil
	}
	for _, path := range systemRoots {
		text, err := r.file(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return text, err
		}
	}
	return nil, nil
}

func (r *rootsFile) file(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if r.path == path && r.size == info.Size() && r.changed.Equal(info.ModTime()) {
		return r.text, nil
	}
	if info.Size() > maxRoots {
		return nil, fmt.Errorf("%s has %d bytes, more than %d", path, info.Size(), maxRoots)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if !x509.NewCertPool().AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no CA certificate in PEM", path)
	}
	*r = rootsFile{path: path, changed: info.ModTime(), size: info.Size(), text: text}
	return text, nil
}
