package nodeconv

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert/converttest"
	"agentrun.dev/internal/network/policy"
	"agentrun.dev/internal/sandbox"
)

// noSecrets is why fields are left.
const noSecrets = "this API does not tell"

// ofRequest lists fields that the caller adds to a request.
var ofRequest = converttest.Same("the caller adds it", "Namespace", "Name", "IdempotencyKey", "Identity")

// TestRoundTrip: requests are the same after conversion in both directions.
func TestRoundTrip(t *testing.T) {
	for check, only := range map[string]func(*sandbox.ReadyCheck){
		"Check.Command": func(r *sandbox.ReadyCheck) { r.Port, r.Delay = 0, 0 },
		"Check.Port":    func(r *sandbox.ReadyCheck) { r.Command, r.Delay = "", 0 },
		"Check.Delay":   func(r *sandbox.ReadyCheck) { r.Command, r.Port = "", 0 },
	} {
		t.Run(check, func(t *testing.T) {
			converttest.Pair[sandbox.TemplateSpec, *nodev1.TemplateSpec]{
				From: FromTemplateSpec, To: ToTemplateSpec, Change: func(s *sandbox.TemplateSpec) { only(s.Ready) },
			}.Check(t)
		})
	}
	converttest.Pair[sandbox.PoolSpec, *nodev1.PoolSpec]{From: FromPoolSpec, To: ToPoolSpec}.Check(t)
	converttest.Pair[sandbox.ClaimRequest, *nodev1.ClaimSandboxRequest]{
		From: FromClaim, To: ToClaim,
		Left:  converttest.Same("the caller adds it", "Namespace", "Name", "Once"),
		Added: converttest.Same("the caller adds it", "IdempotencyKey", "Identity"),
	}.Check(t)
	converttest.Pair[sandbox.Precondition, *nodev1.Precondition]{From: FromPrecondition, To: ToPrecondition}.Check(t)
	converttest.Pair[sandbox.RestoreSpec, *nodev1.RestoreCheckpointRequest]{
		From: FromRestoreSpec, To: ToRestoreSpec, Added: converttest.Both(ofRequest, converttest.Same("the caller adds it", "Checkpoint")),
	}.Check(t)
	converttest.Pair[*policy.Policy, *nodev1.SetNetworkPolicyRequest]{
		From: FromOwnPolicy, To: ToOwnPolicy, Added: converttest.Same("the caller adds it", "Namespace", "Name", "Precondition"),
	}.Check(t)
	converttest.Pair[sandbox.TrafficRequest, *nodev1.GetNetworkLogRequest]{From: FromTrafficRequest, To: ToTrafficRequest}.Check(t)
	converttest.Pair[sandbox.ForkSpec, *nodev1.ForkSandboxRequest]{From: FromForkSpec, To: ToForkSpec, Added: converttest.Both(ofRequest, converttest.Same("the caller adds it", "Precondition"))}.Check(t)
	converttest.Pair[sandbox.CASpec, *nodev1.SetNamespaceCARequest]{
		From: FromCASpec, To: converttest.Sure(ToCASpec), Added: converttest.Same("the caller adds it", "Namespace"),
	}.Check(t)
	converttest.Pair[sandbox.FetchRequest, *nodev1.FetchSnapshotRequest]{
		From: FromFetch, To: ToFetch, Change: func(r *sandbox.FetchRequest) { r.Spec.Ready.Port, r.Spec.Ready.Delay = 0, 0 },
	}.Check(t)
	converttest.Pair[sandbox.Offer, *nodev1.SnapshotOffer]{From: FromOffer, To: ToOffer}.Check(t)
	converttest.Pair[sandbox.NamespaceCA, *nodev1.NamespaceCA]{From: FromNamespaceCA, To: ToNamespaceCA}.Check(t)
	converttest.Pair[sandbox.SecretData, *nodev1.ApplySecretRequest]{
		From: FromSecretData, To: converttest.Sure(func(g *nodev1.ApplySecretRequest) sandbox.SecretData { return ToSecretData(g) }), Added: converttest.Same("the caller adds it", "Namespace", "Name"),
	}.Check(t)
	converttest.Pair[sandbox.Quota, *nodev1.SetQuotaRequest]{From: FromQuota, To: ToQuota}.Check(t)
	converttest.Pair[sandbox.BuildLogRequest, *nodev1.GetTemplateLogRequest]{From: FromBuildLogRequest, To: ToBuildLogRequest}.Check(t)
}

// TestRoundTripOfObjects: answers are the same after conversion in both
// directions.
func TestRoundTripOfObjects(t *testing.T) {
	converttest.Pair[converttest.Template, *nodev1.Template]{
		From: func(v converttest.Template) *nodev1.Template { return FromTemplate(v.Template, v.Builds) },
		To: func(g *nodev1.Template) (converttest.Template, error) {
			t, builds, err := ToTemplate(g)
			return converttest.Template{Template: t, Builds: builds}, err
		},
		Change: func(v *converttest.Template) {
			v.Spec.Ready.Port, v.Spec.Ready.Delay = 0, 0
			v.Built()
		},
		Left: converttest.LeftOfTemplate,
	}.Check(t)
	converttest.Pair[converttest.Pool, *nodev1.Pool]{
		From: func(v converttest.Pool) *nodev1.Pool { return FromPool(v.Pool, v.Status) },
		To: func(g *nodev1.Pool) (converttest.Pool, error) {
			p, status, err := ToPool(g)
			return converttest.Pool{Pool: p, Status: status}, err
		},
	}.Check(t)
	converttest.Pair[sandbox.Sandbox, *nodev1.Sandbox]{
		From: FromSandbox, To: ToSandbox, Left: converttest.Both(converttest.LeftOfSandbox, converttest.Same(noSecrets, "Secrets", "SecretsBy")),
		Added: converttest.Same("the server adds it", "Endpoint"),
	}.Check(t)
	converttest.Pair[sandbox.Fork, *nodev1.Fork]{
		From: FromFork, To: ToFork, Left: converttest.Both(converttest.Same(noSecrets, "By", "HoldsSecrets"), converttest.LeftOfFork),
	}.Check(t)
	converttest.Pair[sandbox.CheckpointSize, *nodev1.Checkpoint]{
		From: FromCheckpoint, To: ToCheckpoint,
		Change: func(c *sandbox.CheckpointSize) { c.Of.Namespace = c.Namespace },
		Left:   converttest.LeftOfCheckpoint,
	}.Check(t)
	converttest.Pair[sandbox.Cost, *nodev1.SandboxStats]{
		From: FromCost, To: ToCost,
		Left: converttest.LeftOfCost,
	}.Check(t)
	converttest.Pair[sandbox.Secret, *nodev1.Secret]{From: FromSecret, To: ToSecret}.Check(t)
	converttest.Pair[sandbox.QuotaUse, *nodev1.Quota]{From: FromQuotaUse, To: ToQuotaUse}.Check(t)
	converttest.Pair[sandbox.TrafficPage, *nodev1.NetworkLog]{From: FromTraffic, To: ToTraffic}.Check(t)
	converttest.Pair[sandbox.NodeStatus, *nodev1.NodeStatus]{
		From: FromNode, To: ToNode, Added: converttest.Same("the server adds it", "Version", "Endpoint"),
	}.Check(t)
	converttest.Pair[sandbox.Error, *nodev1.Error]{
		From: func(e sandbox.Error) *nodev1.Error { return FromError(&e) },
		To:   converttest.Sure(func(g *nodev1.Error) sandbox.Error { return *ToError(g) }),
	}.Check(t)
}

// TestEnumerations: every value of the API has its own value in the vocabulary, and
// vice versa.
func TestEnumerations(t *testing.T) {
	checkEnum(t, phases)
	checkEnum(t, stages)
	checkEnum(t, states, sandbox.Starting) // the API never shows it
	checkEnum(t, reasons)
	checkEnum(t, actions)
}

// valuesOf returns the constants of a type of the vocabulary.
func valuesOf[S ~string](t *testing.T) (values []S) {
	t.Helper()
	files, err := filepath.Glob("../../sandbox/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			if of, ok := spec.Type.(*ast.Ident); ok && of.Name == reflect.TypeFor[S]().Name() {
				for _, v := range spec.Values {
					text, err := strconv.Unquote(v.(*ast.BasicLit).Value)
					if err != nil {
						t.Fatal(err)
					}
					values = append(values, S(text))
				}
			}
			return true
		})
	}
	if len(values) < 2 {
		t.Errorf("%T has the values %q", *new(S), values)
	}
	return values
}

func checkEnum[S ~string, N interface {
	comparable
	protoreflect.Enum
}](t *testing.T, all map[S]N, left ...S) {
	t.Helper()
	for _, s := range valuesOf[S](t) {
		if _, ok := all[s]; ok == slices.Contains(left, s) {
			t.Errorf("%T %q is unspecified over gRPC, or is not to be told of", s, s)
		}
	}
	known := map[protoreflect.EnumNumber]bool{0: true} // 0 is unspecified
	var one N
	for s, n := range all {
		known[n.Number()] = true
		if got := inverse(all, n); got != s {
			t.Errorf("%v is read as %q, was %q", n, got, s)
		}
	}
	values := one.Descriptor().Values()
	for i := range values.Len() {
		if v := values.Get(i); !known[v.Number()] {
			t.Errorf("%s is nothing of the vocabulary", v.Name())
		}
	}
}

// TestRoundTripOfImages: requests and answers about images and registries are the same
// after conversion in both directions.
func TestRoundTripOfImages(t *testing.T) {
	converttest.Pair[sandbox.Image, *nodev1.Image]{From: FromImage, To: ToImage}.Check(t)
	converttest.Pair[sandbox.PublishRequest, *nodev1.PublishImageRequest]{From: FromPublish, To: ToPublish}.Check(t)
	converttest.Pair[sandbox.RegistryLogin, *nodev1.RegistryLogin]{
		From: FromRegistryLogin, To: ToRegistryLogin, Change: func(l *sandbox.RegistryLogin) { l.Registry += ".example.com:5000" },
	}.Check(t)
	converttest.Pair[sandbox.RegistryCredentials, *nodev1.SetRegistryLoginRequest]{
		From: FromRegistryCredentials, To: converttest.Sure(ToRegistryCredentials), Added: converttest.Same("the caller adds it", "Namespace", "Registry"),
	}.Check(t)
}
