package restconv

import (
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/converttest"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// TestRoundTrip: requests are the same after conversion in both directions.
func TestRoundTrip(t *testing.T) {
	converttest.Pair[sandbox.TemplateSpec, rest.TemplateSpec]{From: FromTemplateSpec, To: ToTemplateSpec}.Check(t)
	converttest.Pair[sandbox.PoolSpec, rest.PoolSpec]{From: FromPoolSpec, To: ToPoolSpec}.Check(t)
	converttest.Pair[sandbox.ClaimSpec, rest.SandboxCreate]{
		From: FromClaimSpec, To: ToClaimSpec, Added: converttest.Same("it is the object's, not the claim's", "Name"),
	}.Check(t)
	converttest.Pair[sandbox.RestoreSpec, rest.CheckpointRestore]{
		From: FromRestoreSpec, To: ToRestoreSpec, Added: converttest.Same("it is the object's, not the restore's", "Name"),
	}.Check(t)
	converttest.Pair[sandbox.ForkSpec, rest.ForkCreate]{
		From: FromForkSpec, To: func(g rest.ForkCreate) (sandbox.ForkSpec, error) { return ToForkSpec("of-path", g) },
		Left:  converttest.Both(converttest.Same("it is in the path", "Source"), converttest.Same("only a controller gives them", "Children.Owner", "Children.Token")),
		Added: converttest.Same("it is the object's, not the fork's", "Name"),
	}.Check(t)
	converttest.Pair[sandbox.Quota, rest.QuotaSpec]{
		From: FromQuota, To: func(g rest.QuotaSpec) (sandbox.Quota, error) { return ToQuota("of-path", g) },
		Left: converttest.Same("it is in the path", "Namespace"),
	}.Check(t)
	converttest.Pair[sandbox.SecretData, rest.SecretValues]{
		From: FromSecretData, To: ToSecretData, Added: converttest.Same("Data holds text as well", "StringData"),
	}.Check(t)
	converttest.Pair[sandbox.CASpec, rest.CASpec]{From: FromCASpec, To: converttest.Sure(ToCASpec)}.Check(t)
}

// TestRoundTripOfObjects: answers are the same after conversion in both
// directions.
func TestRoundTripOfObjects(t *testing.T) {
	converttest.Pair[converttest.Template, rest.Template]{
		From: func(v converttest.Template) rest.Template { return FromTemplate(v.Template, v.Builds) },
		To: func(g rest.Template) (converttest.Template, error) {
			t, builds, err := ToTemplate(g)
			return converttest.Template{Template: t, Builds: builds}, err
		},
		Change: (*converttest.Template).Built,
		Left:   converttest.LeftOfTemplate,
	}.Check(t)
	converttest.Pair[converttest.Pool, rest.Pool]{
		From: func(v converttest.Pool) rest.Pool { return FromPool(v.Pool, v.Status) },
		To: func(g rest.Pool) (converttest.Pool, error) {
			p, status, err := ToPool(g)
			return converttest.Pool{Pool: p, Status: status}, err
		},
	}.Check(t)
	converttest.Pair[sandbox.Sandbox, rest.Sandbox]{
		From: FromSandbox, To: ToSandbox, Left: converttest.LeftOfSandbox,
		Added: converttest.Same("the server gives it to whoever made the sandbox", "Token"),
	}.Check(t)
	converttest.Pair[sandbox.Fork, rest.Fork]{
		From: FromFork, To: ToFork, Left: converttest.LeftOfFork, Added: converttest.Same("the server gives it to whoever made the fork", "Children.Token"),
	}.Check(t)
	converttest.Pair[sandbox.CheckpointSize, rest.Checkpoint]{
		From: FromCheckpoint, To: ToCheckpoint,
		Change: func(c *sandbox.CheckpointSize) { c.Of.Namespace = c.Namespace },
		Left:   converttest.LeftOfCheckpoint,
	}.Check(t)
	converttest.Pair[sandbox.Cost, rest.SandboxStats]{
		From: FromCost, To: ToCost,
		Left: converttest.LeftOfCost,
	}.Check(t)
	converttest.Pair[policy.Policy, rest.NetworkPolicy]{From: FromNetworkPolicy, To: ToNetworkPolicy}.Check(t)
	converttest.Pair[sandbox.TrafficPage, rest.NetworkLog]{From: FromTraffic, To: ToTraffic}.Check(t)
	converttest.Pair[sandbox.NodeStatus, rest.Node]{From: FromNode, To: ToNode, Left: converttest.Same("they are those of gRPC", "Features")}.Check(t)
	converttest.Pair[sandbox.QuotaUse, rest.Quota]{From: FromQuotaUse, To: ToQuotaUse}.Check(t)
	converttest.Pair[sandbox.Secret, rest.Secret]{From: FromSecret, To: ToSecret}.Check(t)
	converttest.Pair[sandbox.NamespaceCA, rest.NamespaceCA]{From: FromNamespaceCA, To: ToNamespaceCA}.Check(t)
	converttest.Pair[sandbox.Error, rest.Error]{
		From: func(e sandbox.Error) rest.Error { return FromError(&e) },
		To:   converttest.Sure(func(g rest.Error) sandbox.Error { return *ToError(g) }),
	}.Check(t)
}

// TestRefuses: a value without the form of its field is refused.
func TestRefuses(t *testing.T) {
	good := FromSandbox(sandbox.Sandbox{Key: sandbox.Key{Namespace: "n", Name: "x"}, ID: sandbox.NewID()})
	if _, err := ToSandbox(good); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*rest.Sandbox){
		"namespace": func(s *rest.Sandbox) { s.Namespace = "../n" },
		"name":      func(s *rest.Sandbox) { s.Name = "" },
		"id":        func(s *rest.Sandbox) { s.Id = "../../etc" },
		"pool":      func(s *rest.Sandbox) { s.Pool = "A" },
		"parent":    func(s *rest.Sandbox) { s.Parent = "x" },
		"memory":    func(s *rest.Sandbox) { s.Memory = -1 },
		"timeout":   func(s *rest.Sandbox) { s.Timeout = "-1s" },
		"policy":    func(s *rest.Sandbox) { s.NetworkPolicy = &rest.NetworkPolicy{Egress: "some"} },
		"bound":     func(s *rest.Sandbox) { s.NetworkBounds = []rest.NetworkPolicy{{}, {Allow: []string{"*"}}} },
		"secret":    func(s *rest.Sandbox) { s.Secrets = []rest.SecretRef{{Name: "/"}} },
	} {
		bad := good
		change(&bad)
		if got, err := ToSandbox(bad); !sandbox.HasCode(err, sandbox.CodeInvalid) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// TestRoundTripOfImages: requests and answers about images and registries are the same
// after conversion in both directions.
func TestRoundTripOfImages(t *testing.T) {
	converttest.Pair[sandbox.Image, rest.Image]{From: FromImage, To: ToImage}.Check(t)
	converttest.Pair[sandbox.PublishRequest, rest.ImagePublish]{From: FromPublish, To: ToPublish}.Check(t)
	converttest.Pair[sandbox.RegistryLogin, rest.RegistryLogin]{
		From: FromRegistryLogin, To: ToRegistryLogin, Change: func(l *sandbox.RegistryLogin) { l.Registry += ".example.com:5000" },
	}.Check(t)
	converttest.Pair[sandbox.RegistryCredentials, rest.RegistryCredentials]{
		From: FromRegistryCredentials, To: converttest.Sure(ToRegistryCredentials), Added: converttest.Same("the caller adds it", "Registry"),
	}.Check(t)
}
