package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"agentrun.dev/internal/network/inject"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/node/journal"
	"agentrun.dev/internal/sandbox"
)

// injections lists the machines whose requests get values put in, so that a changed value
// reaches each of them.
type injections struct {
	// joining is held for reading from the time when values are read until the machine is in
	// all. It is held for writing while values change. So no machine is joined with an old
	// value.
	joining sync.RWMutex

	mu  sync.Mutex // protects all
	all map[*joined]injected
}

// injected says which values the requests of a machine get.
type injected struct {
	namespace sandbox.Namespace
	secrets   []sandbox.SecretRef
	trusted   string // the CA that is in its trust stores
}

func (i *injections) add(j *joined, what injected) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.all == nil {
		i.all = map[*joined]injected{}
	}
	i.all[j] = what
}

func (i *injections) remove(j *joined) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.all, j)
}

// of returns the machines that a change concerns.
func (i *injections) of(concerns func(injected) bool) map[*joined]injected {
	i.mu.Lock()
	defer i.mu.Unlock()
	out := map[*joined]injected{}
	for j, what := range i.all {
		if concerns(what) {
			out[j] = what
		}
	}
	return out
}

// hosts returns the hosts whose requests get values, with the current values. A missing
// value or certificate becomes a problem of that value or host, and its requests are
// refused.
func (m *Manager) hosts(what injected) []inject.Host {
	byName := map[policy.Name]*inject.Host{}
	var names []policy.Name
	for _, r := range what.secrets {
		if r.Inject == nil {
			continue
		}
		name, err := r.Inject.HostName()
		if err != nil {
			m.cfg.Log.Error("an injected secret names no host", "secret", r.Secret, "error", err) // it was checked by the claim
			continue
		}
		h := byName[name]
		if h == nil {
			h = m.host(what, name)
			byName[name] = h
			names = append(names, name)
		}
		h.Credentials = append(h.Credentials, m.credential(what.namespace, r))
	}
	out := make([]inject.Host, 0, len(names))
	for _, name := range names {
		out = append(out, *byName[name])
	}
	return out
}

// host returns a host with a certificate, or with the reason why it has no
// certificate.
func (m *Manager) host(what injected, name policy.Name) *inject.Host {
	h := &inject.Host{Name: name}
	ca, problem := m.trustedCA(what.namespace, what.trusted, "the sandbox")
	if problem == nil {
		var key []byte
		if h.Certificate, key, problem = ca.Leaf(name, time.Now()); problem == nil {
			h.Key = inject.Value(key)
		}
	}
	h.Problem = problemOf(problem)
	return h
}

// credential returns a value and its place in requests.
func (m *Manager) credential(n sandbox.Namespace, r sandbox.SecretRef) inject.Credential {
	c := inject.Credential{
		Secret: string(r.Secret) + "/" + r.Key, Header: r.Inject.Header, Format: r.Inject.FormatOrSlot(), Placeholder: r.Placeholder(),
	}
	value, err := m.secretValue(n, r)
	if err == nil {
		err = inject.CheckValue(value)
	}
	if err == nil {
		c.Value = inject.Value(value)
	}
	c.Problem = problemOf(err)
	return c
}

// problemOf returns an error in the form for networks.
func problemOf(err error) string {
	const most = 500
	if err == nil {
		return ""
	}
	return err.Error()[:min(len(err.Error()), most)]
}

// trustedCA returns the CA of a namespace, if it is the one that the sandbox or template of the
// name who trusts.
func (m *Manager) trustedCA(n sandbox.Namespace, trusted, who string) (namespaceCA, error) {
	ca, ok := m.authorities.get(n)
	switch {
	case trusted == "":
		return ca, sandbox.Errorf(sandbox.CodeConflict, "%s trusts no CA, so no values can be put into requests", who).
			Try("Give the template `trustNamespaceCA: true`")
	case !ok:
		return ca, sandbox.Errorf(sandbox.CodeConflict, "%s trusts the CA %.12s, and namespace %s has none", who, trusted, n).
			Try("Set that CA (`agentrun ca set`), or build the template again")
	case ca.Fingerprint() != trusted:
		return ca, sandbox.Errorf(sandbox.CodeConflict, "%s trusts the CA %.12s, and that of namespace %s is %.12s (%s)", who, trusted, n, ca.Fingerprint(), ca.Subject()).
			Because("the template was built with the CA of another namespace, or the CA was replaced since").
			Try("Templates are built again when the CA changes: claim when that is done (`agentrun get pools`)")
	}
	return ca, nil
}

// checkInject refuses a claim whose values could never be put into requests.
func (m *Manager) checkInject(n sandbox.Namespace, from *stock, refs []sandbox.SecretRef) error {
	if !sandbox.Injects(refs) {
		return nil
	}
	if m.cfg.Network == nil {
		return sandbox.Errorf(sandbox.CodeUnimplemented, "this daemon connects no sandboxes, so no values can be put into their requests")
	}
	template := from.build.Template.Name
	ca, err := m.trustedCA(n, from.build.TrustedCA, "template "+string(template))
	if err != nil {
		return err
	}
	bounds := sandbox.EgressOf(from.policy.Load(), nil).Bounds
	for _, r := range refs {
		if r.Inject == nil {
			continue
		}
		name, err := r.Inject.HostName()
		if err != nil {
			return sandbox.Invalid("secrets.inject.host", "%v", err)
		}
		if d := bounds.Name(name, policy.TCP, 443); !d.Allowed {
			return sandbox.Errorf(sandbox.CodeConflict, "secret %s is for requests to %s, which template %s does not allow", r.Secret, name, template).
				Because("%s", d.Reason).Try("Add %s:443 to the template's networkPolicy", name)
		}
		if _, _, err := ca.Leaf(name, time.Now()); err != nil {
			return sandbox.Errorf(sandbox.CodeConflict, "the CA of namespace %s does not stand for %s", n, name).Because("%w", err).
				Try("`agentrun ca show -n %s` shows the names that it is limited to", n)
		}
		if c := m.credential(n, r); c.Problem != "" {
			return sandbox.Errorf(sandbox.CodeInvalid, "%s cannot be put into the header %s", c.Secret, c.Header).Because("%s", c.Problem)
		}
	}
	return nil
}

// noteInject logs which secrets the requests of a sandbox get. It never logs their
// values.
func (m *Manager) noteInject(ctx context.Context, s sandbox.Sandbox) {
	for _, r := range s.Secrets {
		if r.Inject != nil {
			m.cfg.Log.Warn("requests of a sandbox get a secret", "namespace", s.Namespace, "sandbox", s.Name, "id", s.ID, "secret", r.Secret, "key", r.Key,
				"host", r.Inject.Host, "header", r.Inject.Header, "principal", string(sandbox.PrincipalOf(ctx)))
		}
	}
}

// refresh sends the network the current values and certificates for the machines that a
// change concerns. The caller holds injections.joining.
func (m *Manager) refresh(ctx context.Context, concerns func(injected) bool) error {
	var errs []error
	for j, what := range m.injections.of(concerns) {
		hosts := m.hosts(what)
		if err := j.push(ctx, func(at *Joint) { at.Injections = hosts }); err != nil {
			errs = append(errs, fmt.Errorf("machine %s: %w", j.now().Machine, err))
		}
	}
	return errors.Join(errs...)
}

// changeSecret changes a secret, and updates the requests that get it.
func (m *Manager) changeSecret(ctx context.Context, k sandbox.Key, do func(old *secretRecord) (*secretRecord, error)) (sandbox.Secret, error) {
	m.injections.joining.Lock()
	defer m.injections.joining.Unlock()
	s, err := m.secrets.change(k, do)
	if err != nil {
		return s, err
	}
	err = m.refresh(context.WithoutCancel(ctx), func(i injected) bool {
		return i.namespace == k.Namespace && slices.ContainsFunc(i.secrets, func(r sandbox.SecretRef) bool { return r.Secret == k.Name && r.Inject != nil })
	})
	if err != nil {
		m.cfg.Log.Error("requests of sandboxes get a changed secret when their network is back", "namespace", k.Namespace, "secret", k.Name, "error", err)
	}
	return s, nil
}

// NamespaceCA returns the CA that sandboxes of a namespace can trust.
func (m *Manager) NamespaceCA(_ context.Context, n sandbox.Namespace) (sandbox.NamespaceCA, error) {
	ca, ok := m.authorities.get(n)
	if !ok {
		return sandbox.NamespaceCA{}, sandbox.Errorf(sandbox.CodeNotFound, "namespace %s has no CA", n).
			Try("It is made for the first template with `trustNamespaceCA: true`, or by `agentrun ca create -n %s`", n)
	}
	return ca.public(n), nil
}

// SetNamespaceCA gives a namespace another CA. Templates that trust the CA are built
// again. Sandboxes that trust an earlier CA keep it, and their requests for values are
// refused.
func (m *Manager) SetNamespaceCA(ctx context.Context, n sandbox.Namespace, spec sandbox.CASpec) (sandbox.NamespaceCA, error) {
	if err := m.begin(); err != nil {
		return sandbox.NamespaceCA{}, err
	}
	if err := spec.Validate(); err != nil {
		return sandbox.NamespaceCA{}, err
	}
	ca, err := m.replaceCA(ctx, n, spec)
	if err != nil {
		return sandbox.NamespaceCA{}, err
	}
	return ca.public(n), m.rebuildTrusting(ctx, n)
}

func (m *Manager) replaceCA(ctx context.Context, n sandbox.Namespace, spec sandbox.CASpec) (namespaceCA, error) {
	m.injections.joining.Lock()
	defer m.injections.joining.Unlock()
	ca, err := m.authorities.set(n, spec)
	if err != nil {
		return ca, err
	}
	m.cfg.Log.Warn("a namespace has another CA", "namespace", n, "ca", ca.Fingerprint(), "principal", string(sandbox.PrincipalOf(ctx)))
	if err := m.refresh(context.WithoutCancel(ctx), func(i injected) bool { return i.namespace == n }); err != nil {
		m.cfg.Log.Error("sandboxes are shown certificates of another CA when their network is back", "namespace", n, "error", err)
	}
	return ca, nil
}

// rebuildTrusting makes new revisions of the templates that contain a CA.
func (m *Manager) rebuildTrusting(ctx context.Context, n sandbox.Namespace) error {
	var trusting []sandbox.Template
	err := m.db.View(func(tx *journal.Tx) error {
		return templates.Each(tx, "", func(_ string, t sandbox.Template) error {
			if t.Namespace == n && t.Spec.TrustNamespaceCA {
				trusting = append(trusting, t)
			}
			return nil
		})
	})
	slices.SortFunc(trusting, func(a, b sandbox.Template) int { return cmp.Compare(a.Name, b.Name) })
	for _, t := range trusting {
		_, applied := m.ApplyTemplate(sandbox.WithOwning(ctx), t.Key, t.Spec) // only the CA changes
		err = errors.Join(err, applied)
	}
	return err
}

// templateCA returns the CA that a template's sandboxes have to trust, or the zero
// CA.
func (m *Manager) templateCA(n sandbox.Namespace, spec sandbox.TemplateSpec) (certificate []byte, fingerprint string, err error) {
	if !spec.TrustNamespaceCA {
		return nil, "", nil
	}
	ca, err := m.authorities.ensure(n)
	if err != nil {
		return nil, "", err
	}
	return ca.Certificate(), ca.Fingerprint(), nil
}

// renewEvery is how often certificates of hosts are signed again. They are valid for months.
const renewEvery = 24 * time.Hour

// renewCertificates renews the certificates of hosts before they expire.
func (m *Manager) renewCertificates() {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			m.renew()
		case <-m.ctx.Done():
			return
		}
	}
}

func (m *Manager) renew() {
	m.injections.joining.Lock()
	defer m.injections.joining.Unlock()
	if err := m.refresh(m.ctx, func(injected) bool { return true }); err != nil {
		m.cfg.Log.Error("sign certificates of hosts anew", "error", err)
	}
}

// mayInject refuses a claim that the pool's current revision cannot serve, before the claim
// takes a machine.
func (p *pool) mayInject(n sandbox.Namespace, refs []sandbox.SecretRef) error {
	p.mu.Lock()
	current := p.current
	p.mu.Unlock()
	if current == nil {
		return nil // the claim itself reports why it fails
	}
	return p.manager.checkInject(n, current, refs)
}
