package sandbox

import "slices"

// Requests that make an object. Key names the object. Once identifies a request
// that may be repeated; nil is a request that is made only once.

// ClaimRequest asks for a sandbox of a pool.
type ClaimRequest struct {
	Key
	Spec ClaimSpec
	Once *Once
	// Owner identifies a repeated request in place of Once; it is empty if the sandbox
	// has no owner.
	Owner UID
	// Token is the hash of the sandbox's token. If it is empty, the node makes
	// a token.
	Token TokenHash
	// Values are values of secrets, by the variables that they become.
	Values SecretData
}

// ForkRequest asks for sandboxes that continue from a running one, which must meet
// When.
type ForkRequest struct {
	Key
	Spec ForkSpec
	Once *Once
	When Precondition
}

// CheckpointRequest asks to write the sandbox Source to disk. The sandbox must
// meet When.
type CheckpointRequest struct {
	Key
	Source Name
	Once   *Once
	When   Precondition
}

// RestoreRequest asks for a sandbox that continues from a checkpoint.
type RestoreRequest struct {
	Key
	Checkpoint Name
	Spec       RestoreSpec
	Once       *Once
}

// SandboxesRequest asks for a list of sandboxes. Ended includes those that have
// ended.
type SandboxesRequest struct {
	Namespace Namespace
	Page      Page
	Ended     bool
}

// BuildLogRequest asks for the log of a template's build at a stage. With Follow
// the answer continues until the build has ended.
type BuildLogRequest struct {
	Key
	Stage  Stage
	Follow bool
	// Offset is the byte of the log that the answer begins at. Tail, if set, begins
	// at the last lines instead, this many. Without both the answer has the whole
	// log.
	Offset int64
	Tail   *int
	// Begun, if set, is called before the first byte, with the number of bytes that
	// were logged until then.
	Begun func(end int64)
}

// Validate refuses values of secrets and an Owner that no claim with this spec
// can have.
func (r ClaimRequest) Validate() error {
	if r.Owner != "" && r.Once != nil {
		return Invalid("owner", "the request has an idempotency key, too: its owner is the key")
	}
	if len(r.Values) == 0 {
		return nil
	}
	if err := r.Values.Validate(); err != nil {
		return err
	}
	for name := range r.Values {
		_, plain := r.Spec.Env[name]
		if !envName.MatchString(name) {
			return Invalid("secret_values", "%s is no name for an environment variable", Quote(name))
		}
		if plain || slices.ContainsFunc(r.Spec.Secrets, func(s SecretRef) bool { return s.Variable() == name }) {
			return Invalid("secret_values", "the variable %s is there twice", name)
		}
	}
	return nil
}

// Validate refuses a request that no log can serve.
func (r BuildLogRequest) Validate() error {
	switch {
	case r.Stage != AfterInit && r.Stage != AfterReady:
		return Invalid("stage", "%s is neither %s nor %s", Quote(string(r.Stage)), AfterInit, AfterReady)
	case r.Offset < 0:
		return Invalid("offset", "%d is negative", r.Offset)
	case r.Tail != nil && *r.Tail < 0:
		return Invalid("tail", "%d is negative", *r.Tail)
	case r.Tail != nil && r.Offset > 0:
		return Invalid("tail", "the log is asked for from an offset and from its last lines at once: leave one of them out")
	}
	return nil
}
