package manifest

import (
	"errors"
	"fmt"

	"agentrun.dev/internal/sandbox"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kindSecret is the only kind that comes from Kubernetes, with apiVersion v1.
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
	s, err := Unmarshal[secret](doc)
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
	for key, value := range s.StringData { // these take precedence, as in Kubernetes
		o.Secret[key] = []byte(value)
	}
	if len(o.Secret) == 0 {
		return errors.New("data: a secret has at least one key")
	}
	return nil
}
