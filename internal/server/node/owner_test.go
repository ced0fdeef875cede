package node

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// TestOwnersByRole: a claim by owner is the same for every controller, whose principals own the
// objects that they make. Gateways and others neither give owners nor change owned objects, and
// use them as before. Other namespaces see nothing of them.
func TestOwnersByRole(t *testing.T) {
	n := newMutualNode(t, defaultBounds, func(c *server.Config) { c.Endpoint = "https://10.0.0.5:7070" })
	one, two := nodev1.NewNodeClient(n.as("controller/one")), nodev1.NewNodeClient(n.as("controller/two"))
	gateway := nodev1.NewNodeClient(n.as("gateway/g"))
	team := acting(t, "agentrun-principal", "kubernetes:team-a")
	admin := acting(t, "agentrun-principal", "gateway-key:aaaaaaaaaaaa", "agentrun-role", "admin")
	managertest.Must(one.ApplyTemplate(team, &nodev1.ApplyTemplateRequest{Namespace: "team-a", Name: "python", Spec: &nodev1.TemplateSpec{Image: "python"}, Owner: "T"}))(t)
	managertest.Must(one.ApplyPool(team, &nodev1.ApplyPoolRequest{Namespace: "team-a", Name: "pool", Spec: &nodev1.PoolSpec{Template: "python", Replicas: 1}, Owner: "P"}))(t)
	n.Eventually(func() bool {
		p := managertest.Must(two.GetPool(team, &nodev1.GetPoolRequest{Namespace: "team-a", Name: "pool"}))(t)
		return p.GetReady() == 1 && p.GetOwner() == "P"
	})
	ask := func(token string) *nodev1.ClaimSandboxRequest {
		return &nodev1.ClaimSandboxRequest{
			Namespace: "team-a", Name: "a", Pool: "pool", Owner: "S", TokenSha256: string(sandbox.HashToken(token)),
			SecretValues: map[string][]byte{"KEY": []byte(token)}, Lifetime: &nodev1.Lifetime{Expires: timestamppb.New(time.Unix(4e9, 0))},
		}
	}
	made := managertest.Must(one.ClaimSandbox(team, ask("ars_one")))(t)
	var header metadata.MD
	again := managertest.Must(two.ClaimSandbox(team, ask("ars_two"), grpc.Header(&header)))(t)
	if again.GetId() != made.GetId() || again.GetOwner() != "S" || again.GetEndpoint() != "https://10.0.0.5:7070" || again.GetState() != nodev1.SandboxState_SANDBOX_STATE_RUNNING ||
		again.GetResourceVersion() == 0 || again.GetLifetime().GetExpires().GetSeconds() != 4e9 || len(header.Get(replayedHeader)) != 1 {
		t.Errorf("%v, %v, not %v", again, header, made)
	}
	otherwise := ask("ars_one")
	otherwise.Metadata = map[string]string{"a": "b"}
	_, err := two.ClaimSandbox(team, otherwise)
	wantRefused(t, err, codes.FailedPrecondition, "conflict", "these fields differ: metadata")
	// A gateway, for an admin, and a controller for another namespace.
	_, err = gateway.ClaimSandbox(admin, ask("ars_one"))
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "an owner is not yours to give")
	_, err = gateway.ReleaseOwner(admin, &nodev1.ReleaseOwnerRequest{Namespace: "team-a", Owner: "S"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "an owner is not yours to give")
	_, err = gateway.ApplyPool(admin, &nodev1.ApplyPoolRequest{Namespace: "team-a", Name: "q", Spec: &nodev1.PoolSpec{Template: "python"}, Owner: "Q"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "an owner is not yours to give")
	_, err = gateway.KillSandbox(admin, &nodev1.KillSandboxRequest{Namespace: "team-a", Name: "a"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "its owner is S")
	_, err = gateway.SetSandboxToken(admin, &nodev1.SetSandboxTokenRequest{Namespace: "team-a", Name: "a", TokenSha256: string(sandbox.HashToken("x"))})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "its owner is S")
	_, err = gateway.DeleteTemplate(admin, &nodev1.DeleteTemplateRequest{Namespace: "team-a", Name: "python"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "its owner is T")
	managertest.Must(gateway.ClaimSandbox(admin, &nodev1.ClaimSandboxRequest{Namespace: "team-a", Name: "b", Pool: "pool"}))(t)
	stranger := acting(t, "agentrun-principal", "kubernetes:team-b")
	_, err = two.ClaimSandbox(stranger, ask("ars_one"))
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "team-a is not one of yours")
	_, err = two.ReleaseOwner(stranger, &nodev1.ReleaseOwnerRequest{Namespace: "team-a", Owner: "S"})
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "team-a is not one of yours")
	_, err = two.ReleaseOwner(stranger, &nodev1.ReleaseOwnerRequest{Namespace: "team-b", Owner: "S"})
	wantRefused(t, err, codes.NotFound, "not_found", "has no sandbox in namespace team-b")
	_, err = two.KillSandbox(stranger, &nodev1.KillSandboxRequest{Namespace: "team-a", Name: "a", Precondition: &nodev1.Precondition{Id: made.GetId()}})
	wantRefused(t, err, codes.NotFound, "not_found", "a does not exist")
	// Itself a controller makes nothing.
	_, err = one.ClaimSandbox(t.Context(), ask("ars_one"))
	wantRefused(t, err, codes.PermissionDenied, "permission_denied", "Name the principal")

	managertest.Must(two.SetSandboxToken(team, &nodev1.SetSandboxTokenRequest{Namespace: "team-a", Name: "a", TokenSha256: string(sandbox.HashToken("ars_two"))}))(t)
	_, _, err = n.Manager.SandboxOfToken(t.Context(), sandbox.Token{Hash: sandbox.HashToken("ars_one")})
	if !sandbox.HasCode(err, sandbox.CodeNotFound) {
		t.Errorf("the token before: %v", err)
	}
	managertest.Must(two.KillSandbox(team, &nodev1.KillSandboxRequest{Namespace: "team-a", Name: "a", Precondition: &nodev1.Precondition{Id: made.GetId(), Owner: "S"}}))(t)
	_, err = two.KillSandbox(team, &nodev1.KillSandboxRequest{Namespace: "team-a", Name: "a", Precondition: &nodev1.Precondition{Id: made.GetId()}})
	wantRefused(t, err, codes.NotFound, "ended", "has ended (killed)")
	if ended := managertest.Must(one.ClaimSandbox(team, ask("ars_three")))(t); ended.GetId() != made.GetId() || ended.GetReason() != nodev1.EndReason_END_REASON_KILLED {
		t.Errorf("%v", ended)
	}
	managertest.Must(two.ReleaseOwner(team, &nodev1.ReleaseOwnerRequest{Namespace: "team-a", Owner: "S"}))(t)
	if next := managertest.Must(one.ClaimSandbox(team, ask("ars_three")))(t); next.GetId() == made.GetId() {
		t.Errorf("%v", next)
	}
	for _, e := range n.Events() { // no event has the token or a value
		if text := e.Verb + e.Object + e.Principal; strings.Contains(text, "ars_") {
			t.Errorf("%+v", e)
		}
	}
	if strings.Contains(n.log.String(), "ars_") {
		t.Error("a token or a value is in the log")
	}
}

// TestOnceWithoutValues: nothing that is kept of a request with an idempotency key depends on
// the values of secrets: a short one could be guessed from its digest.
func TestOnceWithoutValues(t *testing.T) {
	ask := func(name, value string) sandbox.Once {
		o := managertest.Must(once(t.Context(), nodev1.Node_ClaimSandbox_FullMethodName, &nodev1.ClaimSandboxRequest{
			Namespace: "default", Pool: "pool", IdempotencyKey: "k", SecretValues: map[string][]byte{name: []byte(value)},
		}))(t)
		return *o
	}
	if ask("PIN", "1234") != ask("PIN", "9876") {
		t.Error("it depends on a value")
	}
	if ask("PIN", "1234") == ask("CODE", "1234") {
		t.Error("it does not depend on the variables")
	}
}
