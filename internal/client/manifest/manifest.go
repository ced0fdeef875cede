// Package manifest reads AgentRun's objects in YAML. An unknown field is an
// error, and so is a field that has no effect.
package manifest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"agentrun.dev/api/v1alpha1"
	"agentrun.dev/internal/convert/v1alpha1conv"
	"agentrun.dev/internal/sandbox"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// Object is one document. Exactly one of the fields besides Key is set.
type Object struct {
	sandbox.Key
	Template *sandbox.TemplateSpec
	Pool     *sandbox.PoolSpec
	Claim    *sandbox.ClaimSpec
	Fork     *sandbox.ForkSpec
	Secret   sandbox.SecretData
}

// Kind returns the name of its kind, as in YAML.
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

// Bounds of a manifest.
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

// empty reports whether a document contains only comments.
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

func readTemplate(o *Object, doc []byte) error {
	t, err := Unmarshal[v1alpha1.SandboxTemplate](doc)
	if err != nil {
		return err
	}
	spec, err := v1alpha1conv.ToTemplateSpec(t.Spec)
	o.Template = &spec
	return err
}

func readPool(o *Object, doc []byte) error {
	p, err := Unmarshal[v1alpha1.SandboxPool](doc)
	if err != nil {
		return err
	}
	spec, err := v1alpha1conv.ToPoolSpec(p.Spec)
	o.Pool = &spec
	return err
}

func readClaim(o *Object, doc []byte) error {
	c, err := Unmarshal[v1alpha1.SandboxClaim](doc)
	if err != nil {
		return err
	}
	spec, err := v1alpha1conv.ToClaimSpec(c.Spec)
	o.Claim = &spec
	return err
}

func readFork(o *Object, doc []byte) error {
	f, err := Unmarshal[v1alpha1.SandboxFork](doc)
	if err != nil {
		return err
	}
	spec, err := v1alpha1conv.ToForkSpec(f.Spec)
	o.Fork = &spec
	return err
}
