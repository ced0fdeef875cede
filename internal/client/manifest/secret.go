package manifest

import (
	"errors"
	"fmt"

	"agentrun.dev/api/v1alpha1"
	"agentrun.dev/internal/sandbox"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kindSecret is the one kind of Kubernetes' own, apiVersion v1.
const kindSecret = "Secret"

// secret is a v1 Secret.
type secret struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Type       string            `json:"type,omitempty"`
	Data       map[string][]byte `json:"data,omitempty"` // base64 in the file
	StringData map[string]string `json:"stringData,omitempty"`
}

func readSecret(o *Object, doc []byte) error {
	s, err := strict[secret](doc)
	if err != nil {
		return err
	}
	if s.Type != "" && s.Type != "Opaque" {
		return fmt.Errorf("type: %.80q is not possible, only Opaque is; leave the field out", s.Type)
	}
	o.Secret = sandbox.SecretData{}
	for key, value := range s.Data {
		o.Secret[key] = value
	}
	for key, value := range s.StringData { // they go before, as in Kubernetes
		o.Secret[key] = []byte(value)
	}
	if len(o.Secret) == 0 {
		return errors.New("data: a secret has at least one key")
	}
	return nil
}

// secretRefs reads the secrets of a claim.
func secretRefs(list []v1alpha1.Secret) (out []sandbox.SecretRef, err error) {
	entries := map[string]bool{}
	for i, s := range list {
		ref := sandbox.SecretRef{Key: s.Key, Env: s.Env}
		of := s.Name
		if r := s.SecretRef; r != nil {
			if s.Key != "" {
				return nil, fmt.Errorf("secrets[%d]: key is there twice, once in secretRef", i)
			}
			if s.Name != "" && entries[s.Name] {
				return nil, fmt.Errorf("secrets[%d]: the name %.80q is there twice", i, s.Name)
			}
			entries[s.Name] = true
			of, ref.Key = r.Name, r.Key
		}
		if ref.Key == "" {
			return nil, fmt.Errorf("secrets[%d]: key is missing: which value of the secret", i)
		}
		if ref.Secret, err = sandbox.ParseName(of); err != nil {
			return nil, fmt.Errorf("secrets[%d]: %w", i, err)
		}
		out = append(out, ref)
	}
	return out, nil
}
