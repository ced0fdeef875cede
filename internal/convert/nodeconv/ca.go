package nodeconv

import (
	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromNamespaceCA converts the public part of a CA.
func FromNamespaceCA(c sandbox.NamespaceCA) *nodev1.NamespaceCA {
	return &nodev1.NamespaceCA{
		Namespace: string(c.Namespace), Certificate: c.Certificate, Fingerprint: c.Fingerprint, Subject: c.Subject, Names: c.Names,
		Created: fromTime(c.Created), Expires: fromTime(c.Expires),
	}
}

// ToNamespaceCA reads the public part of a CA.
func ToNamespaceCA(g *nodev1.NamespaceCA) (sandbox.NamespaceCA, error) {
	var r convert.Reader
	return sandbox.NamespaceCA{
		Namespace: r.Namespace(g.GetNamespace()), Certificate: g.GetCertificate(), Fingerprint: g.GetFingerprint(), Subject: g.GetSubject(), Names: g.GetNames(),
		Created: toTime(g.GetCreated()), Expires: toTime(g.GetExpires()),
	}, r.Err()
}

// FromCASpec makes the request of SetNamespaceCA. The caller adds the
// namespace.
func FromCASpec(s sandbox.CASpec) *nodev1.SetNamespaceCARequest {
	return &nodev1.SetNamespaceCARequest{Names: s.Names, Certificate: s.Certificate, Key: string(s.Key)}
}

// ToCASpec reads the CA that a namespace shall have.
func ToCASpec(g *nodev1.SetNamespaceCARequest) sandbox.CASpec {
	return sandbox.CASpec{Names: g.GetNames(), Certificate: g.GetCertificate(), Key: sandbox.CAKey(g.GetKey())}
}
