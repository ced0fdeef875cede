package sandbox

import "slices"

// Requests that make an object. Each names the object in Key, and has in Once what
// it is known by if it comes again; nil is a request that comes once.

// ClaimRequest asks for a sandbox of a pool.
type ClaimRequest struct {
	Key
	Spec ClaimSpec
	Once *Once
	// Owner is what the request is known by if it comes again, instead of Once; empty is
	// none.
	Owner UID
	// Token is the hash of the sandbox's token; empty leaves that to the node.
	Token TokenHash
	// Values are those of secrets, by the variables that they become.
	Values SecretData
}

// ForkRequest asks for sandboxes that continue from a running one, which meets When.
type ForkRequest struct {
	Key
	Spec ForkSpec
	Once *Once
	When Precondition
}

// CheckpointRequest asks to write the sandbox Source to disk, which meets When.
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

// SandboxesRequest asks for a list of sandboxes; of ended ones, too, with Ended.
type SandboxesRequest struct {
	Namespace Namespace
	Page      Page
	Ended     bool
}

// BuildLogRequest asks for the log of a template's build at a stage; with Follow
// also for what comes until the build has ended.
type BuildLogRequest struct {
	Key
	Stage  Stage
	Follow bool
	// Offset is the byte of the log to begin at. Tail begins at the last so many lines
	// instead; nil is the whole log.
	Offset int64
	Tail   *int
	// Begun, if there is one, is called before the first byte, with how many bytes were
	// logged until then.
	Begun func(end int64)
}

// Validate refuses what no claim can have beside its spec.
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

// Validate refuses what no log has.
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
