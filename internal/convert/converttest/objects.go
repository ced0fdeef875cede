package converttest

import "agentrun.dev/internal/sandbox"

// Template is a template with its builds, as APIs show it.
type Template struct {
	sandbox.Template
	Builds []sandbox.Build
}

// Built sets the template and the revision of the builds.
func (t *Template) Built() {
	for i := range t.Builds {
		t.Builds[i].Template, t.Builds[i].Revision = t.Key, t.Revision
	}
}

// Pool is a pool with its status, as APIs show it.
type Pool struct {
	sandbox.Pool
	Status sandbox.PoolStatus
}

// These fields are in no API. An API can lack further ones, which its test
// adds.
var (
	LeftOfTemplate = Same(ofNode, "Builds.ResourceVersion", "Builds.Snapshot", "Builds.Spec", "Builds.Env", "Builds.Workdir", "Builds.User", "Builds.Lineage", "Builds.TrustedCA", "Builds.Kept", "Builds.Pulled", "Builds.Outdated", "Builds.Fetch", "Image")

	LeftOfSandbox = Both(
		Same(ofNode, "TrustedCA", "Token", "Given"),
		Same(ofNode, "Limits", "Layers", "Live", "Clock", "Machine", "Asleep", "Kept", "Boot", "Egress.Lineage"),
		Same("it may hold what is not for everybody who lists sandboxes", "Env"))

	LeftOfCheckpoint = Both(
		Same(ofNode, "Kept", "Of.Limits", "Of.Layers", "Of.Live", "Of.Clock", "Of.Machine", "Of.Asleep", "Of.Kept", "Of.Boot", "Of.TrustedCA", "Of.Token", "Of.Given"),
		Same("it may hold what is not for everybody who lists checkpoints", "Of.Env"),
		Same(ofSandbox, "Of.ResourceVersion", "Of.State", "Of.Metadata", "Of.Secrets", "Of.SecretsBy", "Of.Parent", "Of.Fork", "Of.Checkpoint",
			"Of.Created", "Of.Ended", "Of.Reason", "Of.Detail", "Of.Unresponsive", "Of.Timeout", "Of.IdleTimeout", "Of.OnTimeout", "Of.Expires", "Of.Owner", "Of.Egress"))

	LeftOfFork = Same(ofNode, "Asked")

	LeftOfCost = Both(LeftOfSandbox,
		Same(ofSandbox, "ResourceVersion", "Pool", "Template", "Revision", "Engine", "Metadata", "Workdir", "User", "Memory", "Secrets", "SecretsBy",
			"Parent", "Fork", "Checkpoint", "Created", "Ended", "Reason", "Detail", "Unresponsive", "Timeout", "IdleTimeout", "OnTimeout", "Expires", "Owner", "Egress.Bounds", "Egress.Own"))
)

const (
	ofNode    = "only the node needs it"
	ofSandbox = "whoever wants to know looks at the sandbox"
)

// Sure adds a nil error to a conversion that cannot fail.
func Sure[A, T any](to func(A) T) func(A) (T, error) {
	return func(a A) (T, error) { return to(a), nil }
}
