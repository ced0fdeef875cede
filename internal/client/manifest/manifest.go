// Package manifest reads the YAML in which people write AgentRun's objects. A
// field that is not known is an error, and so is one that is not acted on.
package manifest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"agentrun.dev/api/v1alpha1"
	"agentrun.dev/internal/sandbox"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// Object is one document. One of the fields but Key is set.
type Object struct {
	sandbox.Key
	Template *sandbox.TemplateSpec
	Pool     *sandbox.PoolSpec
	Claim    *sandbox.ClaimSpec
	Fork     *ForkSpec
	Secret   sandbox.SecretData
}

// ForkSpec is what a fork asks for.
type ForkSpec struct {
	Source   sandbox.Name
	Replicas int
}

// Kind is how people call it.
func (o Object) Kind() string {
	switch {
	case o.Template != nil:
		return v1alpha1.KindSandboxTemplate
	case o.Pool != nil:
		return v1alpha1.KindSandboxPool
	case o.Claim != nil:
		return v1alpha1.KindSandboxClaim
	case o.Secret != nil:
		return kindSecret
	}
	return v1alpha1.KindSandboxFork
}

// Bounds of what is read.
const (
	maxBytes   = 4 << 20
	maxObjects = 1000
)

// Read reads all documents. Objects without a namespace are in the given one.
func Read(r io.Reader, namespace sandbox.Namespace) ([]Object, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read the manifest: %w", err)
	}
	if len(b) > maxBytes {
		return nil, fmt.Errorf("read the manifest: it is larger than %d bytes", maxBytes)
	}
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(b)))
	var out []Object
	for n := 1; ; n++ {
		doc, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the manifest: %w", err)
		}
		if empty(doc) {
			continue
		}
		o, err := decode(doc, namespace)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		if out = append(out, o); len(out) > maxObjects {
			return nil, fmt.Errorf("read the manifest: it has more than %d objects", maxObjects)
		}
	}
}

// empty reports whether a document has nothing but comments.
func empty(doc []byte) bool {
	for line := range bytes.Lines(doc) {
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '#' && string(line) != "---" {
			return false
		}
	}
	return true
}

func decode(doc []byte, namespace sandbox.Namespace) (o Object, err error) {
	var head struct {
		metav1.TypeMeta `json:",inline"`
		Metadata        struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"metadata"`
	}
	if err := yaml.Unmarshal(doc, &head); err != nil {
		return o, fmt.Errorf("it is no YAML object: %w", err)
	}
	read, known := kinds[head.Kind]
	switch {
	case head.APIVersion == "v1" && head.Kind == kindSecret:
		read = readSecret
	case head.APIVersion != v1alpha1.APIVersion:
		return o, fmt.Errorf("apiVersion is %q, want %s", head.APIVersion, v1alpha1.APIVersion)
	case !known:
		return o, fmt.Errorf("kind %q is none of %s, %s, %s, %s, and Secret of v1", head.Kind,
			v1alpha1.KindSandboxTemplate, v1alpha1.KindSandboxPool, v1alpha1.KindSandboxClaim, v1alpha1.KindSandboxFork)
	}
	if o.Namespace = namespace; head.Metadata.Namespace != "" {
		if o.Namespace, err = sandbox.ParseNamespace(head.Metadata.Namespace); err != nil {
			return o, err
		}
	}
	if o.Name, err = sandbox.ParseName(head.Metadata.Name); err != nil {
		return o, fmt.Errorf("metadata.name: %w", err)
	}
	if err := read(&o, doc); err != nil {
		return o, fmt.Errorf("%s %s: %w", head.Kind, o.Name, err)
	}
	return o, nil
}

var kinds = map[string]func(*Object, []byte) error{
	v1alpha1.KindSandboxTemplate: readTemplate,
	v1alpha1.KindSandboxPool:     readPool,
	v1alpha1.KindSandboxClaim:    readClaim,
	v1alpha1.KindSandboxFork:     readFork,
}

// strict decodes a document, and refuses fields that are not known.
func strict[T any](doc []byte) (v T, err error) {
	if err := yaml.UnmarshalStrict(doc, &v); err != nil {
		return v, err
	}
	return v, nil
}

func readTemplate(o *Object, doc []byte) error {
	t, err := strict[v1alpha1.SandboxTemplate](doc)
	if err != nil {
		return err
	}
	s := t.Spec
	if err := refuse(s); err != nil {
		return err
	}
	spec := sandbox.TemplateSpec{
		Image: s.Image, Init: s.Init, Workdir: s.Workdir, User: s.User,
		MilliCPUs: sandbox.DefaultMilliCPUs, Memory: sandbox.DefaultMemory,
	}
	if spec.Env, err = environment(s.Env); err != nil {
		return err
	}
	if !s.Resources.CPU.IsZero() {
		spec.MilliCPUs = uint64(max(0, s.Resources.CPU.MilliValue()))
	}
	if !s.Resources.Memory.IsZero() {
		if spec.Memory, err = bytesOf("resources.memory", s.Resources.Memory); err != nil {
			return err
		}
	}
	if !s.Resources.Disk.IsZero() {
		if spec.Disk, err = bytesOf("resources.disk", s.Resources.Disk); err != nil {
			return err
		}
	}
	if r := s.Ready; r != nil {
		if r.Port < 0 || r.Port > math.MaxUint16 {
			return fmt.Errorf("ready.port: %d is no port", r.Port)
		}
		spec.Ready = &sandbox.ReadyCheck{Command: r.Command, Port: uint16(r.Port), Delay: duration(r.Delay), Timeout: duration(r.Timeout)}
	}
	if w := s.Warmup; w != nil {
		spec.Warmup = &sandbox.Program{Language: w.Language, Text: w.Code}
		if w.Language == "" {
			spec.Warmup.Language = "python"
		}
	}
	o.Template = &spec
	return nil
}

// refuse names what a template asks for that is not there yet.
func refuse(s v1alpha1.SandboxTemplateSpec) error {
	switch {
	case len(s.Volumes) > 0:
		return errors.New("volumes: this version has no volumes yet; leave the field out")
	case s.NetworkPolicy != nil && len(s.NetworkPolicy.Allow) > 0:
		return errors.New("networkPolicy.allow: this version lets nothing out of a sandbox yet; leave the field out")
	case s.NetworkPolicy != nil && s.NetworkPolicy.Egress != "" && s.NetworkPolicy.Egress != "deny":
		return fmt.Errorf("networkPolicy.egress: %q is not possible, this version has only deny", s.NetworkPolicy.Egress)
	}
	return nil
}

func readPool(o *Object, doc []byte) error {
	p, err := strict[v1alpha1.SandboxPool](doc)
	if err != nil {
		return err
	}
	template, err := sandbox.ParseName(p.Spec.TemplateRef.Name)
	if err != nil {
		return fmt.Errorf("templateRef: %w", err)
	}
	o.Pool = &sandbox.PoolSpec{Template: template, Replicas: replicas(p.Spec.Replicas), Stage: sandbox.Stage(p.Spec.SnapshotAfter)}
	return nil
}

func readClaim(o *Object, doc []byte) error {
	c, err := strict[v1alpha1.SandboxClaim](doc)
	if err != nil {
		return err
	}
	pool, err := sandbox.ParseName(c.Spec.PoolRef.Name)
	if err != nil {
		return fmt.Errorf("poolRef: %w", err)
	}
	spec := sandbox.ClaimSpec{Pool: pool, Metadata: c.Spec.Metadata, Lifetime: sandbox.Lifetime{
		Timeout: duration(c.Spec.Timeout), IdleTimeout: duration(c.Spec.IdleTimeout), OnTimeout: sandbox.TimeoutAction(c.Spec.OnTimeout),
	}}
	if spec.Env, err = environment(c.Spec.Env); err != nil {
		return err
	}
	if spec.Secrets, err = secretRefs(c.Spec.Secrets); err != nil {
		return err
	}
	o.Claim = &spec
	return nil
}

func readFork(o *Object, doc []byte) error {
	f, err := strict[v1alpha1.SandboxFork](doc)
	if err != nil {
		return err
	}
	if f.Spec.AllowSecretInheritance {
		return errors.New("allowSecretInheritance: who supplied the secrets forks a sandbox that holds them, nobody else; leave the field out")
	}
	source, err := sandbox.ParseName(f.Spec.SourceRef.Name)
	if err != nil {
		return fmt.Errorf("sourceRef: %w", err)
	}
	o.Fork = &ForkSpec{Source: source, Replicas: replicas(f.Spec.Replicas)}
	return nil
}

func replicas(n *int32) int {
	if n == nil {
		return 1
	}
	return int(*n)
}

func duration(d *metav1.Duration) time.Duration {
	if d == nil {
		return 0
	}
	return d.Duration
}

func environment(vars []v1alpha1.EnvVar) (sandbox.Env, error) {
	if len(vars) == 0 {
		return nil, nil
	}
	out := sandbox.Env{}
	for _, v := range vars {
		if _, twice := out[v.Name]; twice {
			return nil, fmt.Errorf("env: %s is there twice", v.Name)
		}
		out[v.Name] = v.Value
	}
	return out, nil
}

// bytesOf is a quantity of bytes.
func bytesOf(field string, q resource.Quantity) (uint64, error) {
	n, exact := q.AsInt64()
	if !exact || n < 0 {
		return 0, fmt.Errorf("%s: %s is no number of bytes", field, q.String())
	}
	return uint64(n), nil
}
