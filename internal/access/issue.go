package access

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	"agentrun.dev/internal/sandbox"
)

// Issue writes a certificate for a component, and its key, into two files, for clusters
// in which no other program makes them. A node's certificate is valid for both ends of a
// connection, at these hosts; all others are for clients. Issue replaces existing files,
// so that programs that follow them read the new ones.
func (a *Authority) Issue(c Component, hosts []string, life time.Duration, certFile, keyFile string) (until time.Time, err error) {
	use := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	switch {
	case c.Role == RoleNode:
		use = append(use, x509.ExtKeyUsageServerAuth)
	case len(hosts) > 0:
		return until, sandbox.Errorf(sandbox.CodeInvalid, "a certificate of the role %s has no hosts: it is a client's", c.Role)
	}
	if life <= 0 {
		return until, sandbox.Errorf(sandbox.CodeInvalid, "the lifetime %s is not positive", life)
	}
	template := x509.Certificate{Subject: pkix.Name{Organization: []string{"AgentRun"}, CommonName: commonName(c)}}
	addHosts(&template, hosts)
	template.URIs = append(template.URIs, c.URI())
	pair, err := a.issue(template, life, use...)
	if err != nil {
		return until, fmt.Errorf("issue a certificate for %s: %w", c, err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err == nil {
		err = errors.Join(
			writePEM(keyFile, 0o600, &pem.Block{Type: "PRIVATE KEY", Bytes: private}),
			writePEM(certFile, 0o644, &pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}))
	}
	if err != nil {
		return until, fmt.Errorf("write the certificate of %s: %w", c, err)
	}
	return pair.Leaf.NotAfter, nil
}

// commonName is for people; a longer one is not valid (RFC 5280, ub-common-name).
func commonName(c Component) string {
	const most = 64
	name := "AgentRun " + c.String()
	return name[:min(len(name), most)]
}
