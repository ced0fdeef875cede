package restconv

import (
	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

// FromNamespaceCA converts the public part of a CA.
func FromNamespaceCA(c sandbox.NamespaceCA) rest.NamespaceCA {
	out := rest.NamespaceCA{
		Namespace: string(c.Namespace), Certificate: c.Certificate, Fingerprint: c.Fingerprint, Subject: c.Subject, Names: []string{},
		Created: c.Created, Expires: c.Expires,
	}
	out.Names = append(out.Names, c.Names...)
	return out
}

// ToNamespaceCA reads the public part of a CA.
func ToNamespaceCA(g rest.NamespaceCA) (sandbox.NamespaceCA, error) {
	var r convert.Reader
	return sandbox.NamespaceCA{
		Namespace: r.Namespace(g.Namespace), Certificate: g.Certificate, Fingerprint: g.Fingerprint, Subject: g.Subject, Names: g.Names,
		Created: g.Created, Expires: g.Expires,
	}, r.Err()
}

// FromCASpec makes the body of a PUT of a CA.
func FromCASpec(s sandbox.CASpec) rest.CASpec {
	return rest.CASpec{Names: s.Names, Certificate: s.Certificate, Key: string(s.Key)}
}

// ToCASpec reads the CA that a namespace shall have.
func ToCASpec(g rest.CASpec) sandbox.CASpec {
	return sandbox.CASpec{Names: g.Names, Certificate: g.Certificate, Key: sandbox.CAKey(g.Key)}
}

func fromInject(i *sandbox.Inject) *rest.Inject {
	if i == nil {
		return nil
	}
	return &rest.Inject{Host: i.Host, Header: i.Header, Format: i.Format}
}

func toInject(g *rest.Inject) *sandbox.Inject {
	if g == nil {
		return nil
	}
	return &sandbox.Inject{Host: g.Host, Header: g.Header, Format: g.Format}
}
