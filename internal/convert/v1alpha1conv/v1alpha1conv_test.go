package v1alpha1conv

import (
	"testing"

	"agentrun.dev/api/v1alpha1"
	"agentrun.dev/internal/convert/converttest"
	"agentrun.dev/internal/sandbox"
)

// TestRoundTrip: specs are the same after conversion in both directions.
func TestRoundTrip(t *testing.T) {
	converttest.Pair[sandbox.TemplateSpec, v1alpha1.SandboxTemplateSpec]{
		From: FromTemplateSpec, To: ToTemplateSpec,
		Added: converttest.Same("it is refused: there are none yet", "Volumes"),
	}.Check(t)
	converttest.Pair[sandbox.PoolSpec, v1alpha1.SandboxPoolSpec]{From: FromPoolSpec, To: ToPoolSpec}.Check(t)
	converttest.Pair[sandbox.ClaimSpec, v1alpha1.SandboxClaimSpec]{
		From: FromClaimSpec, To: ToClaimSpec, Left: converttest.Same("a controller deletes its claim instead", "Expires"),
		Added: converttest.Same("it says in another form what name and key say", "Secrets.SecretRef"),
	}.Check(t)
	converttest.Pair[sandbox.ForkSpec, v1alpha1.SandboxForkSpec]{
		From: FromForkSpec, To: ToForkSpec, Added: converttest.Same("it is refused", "AllowSecretInheritance"),
		Left: converttest.Same("a controller says it to the node", "Children", "Atomic", "Checkpoint"),
	}.Check(t)
}
