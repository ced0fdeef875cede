package node

import (
	"slices"

	"google.golang.org/protobuf/reflect/protoreflect"

	nodev1 "agentrun.dev/api/node/v1"
)

// feature is a part of the API that its first version did not have. A daemon refuses
// messages with fields that it does not know. So a client asks GetNode for the features,
// and sends only methods and fields that these have. Fields of answers need no feature:
// clients ignore fields that they do not know.
type feature struct {
	name string
	// methods and fields of requests that came with the feature.
	methods []string
	fields  []protoreflect.FullName
}

var features = []feature{
	{name: "watch", methods: []string{nodev1.Node_Watch_FullMethodName}},
	{name: "cordon", methods: []string{
		nodev1.Node_CordonNode_FullMethodName, nodev1.Node_DrainNode_FullMethodName, nodev1.Node_UncordonNode_FullMethodName,
	}},
	{name: "images", methods: []string{
		nodev1.Node_ListImages_FullMethodName, nodev1.Node_PublishImage_FullMethodName, nodev1.Node_UnpublishImage_FullMethodName,
		nodev1.Node_ListRegistryLogins_FullMethodName, nodev1.Node_SetRegistryLogin_FullMethodName, nodev1.Node_DeleteRegistryLogin_FullMethodName,
	}},
	{name: "list-all-namespaces", fields: []protoreflect.FullName{
		"agentrun.node.v1.ListTemplatesRequest.all_namespaces", "agentrun.node.v1.ListPoolsRequest.all_namespaces",
		"agentrun.node.v1.ListSandboxesRequest.all_namespaces", "agentrun.node.v1.ListForksRequest.all_namespaces",
		"agentrun.node.v1.ListCheckpointsRequest.all_namespaces",
	}},
	{
		name:    "owners",
		methods: []string{nodev1.Node_ReleaseOwner_FullMethodName, nodev1.Node_SetSandboxToken_FullMethodName},
		fields: []protoreflect.FullName{
			"agentrun.node.v1.ApplyTemplateRequest.owner", "agentrun.node.v1.ApplyPoolRequest.owner", "agentrun.node.v1.ClaimSandboxRequest.owner",
			"agentrun.node.v1.ClaimSandboxRequest.token_sha256", "agentrun.node.v1.ClaimSandboxRequest.secret_values",
			"agentrun.node.v1.ClaimSandboxRequest.SecretValuesEntry.key", "agentrun.node.v1.ClaimSandboxRequest.SecretValuesEntry.value",
		},
	},
	{name: "fork-children", fields: []protoreflect.FullName{
		"agentrun.node.v1.ForkSandboxRequest.children", "agentrun.node.v1.ForkSandboxRequest.atomic", "agentrun.node.v1.ForkSandboxRequest.checkpoint",
		"agentrun.node.v1.ForkChild.name", "agentrun.node.v1.ForkChild.owner", "agentrun.node.v1.ForkChild.token_sha256",
	}},
	{
		name: "snapshots",
		methods: []string{
			nodev1.Node_GetSnapshotOffer_FullMethodName, nodev1.Node_FetchSnapshot_FullMethodName,
			nodev1.Node_GetSnapshotParts_FullMethodName, nodev1.Node_ReadSnapshot_FullMethodName,
		},
	},
	{name: "use", methods: []string{
		nodev1.Node_UseSandbox_FullMethodName, nodev1.Node_GetSandboxByID_FullMethodName, nodev1.Node_WatchToken_FullMethodName,
	}},
	{name: "template-logs", methods: []string{nodev1.Node_GetTemplateLog_FullMethodName}},
	{
		name: "secrets",
		methods: []string{
			nodev1.Node_ApplySecret_FullMethodName, nodev1.Node_PatchSecret_FullMethodName, nodev1.Node_GetSecret_FullMethodName,
			nodev1.Node_ListSecrets_FullMethodName, nodev1.Node_DeleteSecret_FullMethodName,
		},
		fields: []protoreflect.FullName{
			"agentrun.node.v1.ClaimSandboxRequest.secrets", "agentrun.node.v1.SecretRef.secret", "agentrun.node.v1.SecretRef.key",
			"agentrun.node.v1.SecretRef.env", "agentrun.node.v1.SecretRef.inject", "agentrun.node.v1.Inject.host",
			"agentrun.node.v1.Inject.header", "agentrun.node.v1.Inject.format",
		},
	},
	{name: "quotas", methods: []string{nodev1.Node_GetQuota_FullMethodName, nodev1.Node_SetQuota_FullMethodName}},
	{name: "identity", fields: []protoreflect.FullName{
		"agentrun.node.v1.ClaimSandboxRequest.identity", "agentrun.node.v1.ForkSandboxRequest.identity",
		"agentrun.node.v1.CheckpointSandboxRequest.identity", "agentrun.node.v1.RestoreCheckpointRequest.identity",
		"agentrun.node.v1.RequestIdentity.key", "agentrun.node.v1.RequestIdentity.body",
	}},
	{name: "expires", fields: []protoreflect.FullName{"agentrun.node.v1.Lifetime.expires", "agentrun.node.v1.ExtendSandboxRequest.expires"}},
	{name: "preconditions", fields: []protoreflect.FullName{
		"agentrun.node.v1.Precondition.id", "agentrun.node.v1.Precondition.owner", "agentrun.node.v1.Precondition.resource_version",
		"agentrun.node.v1.DeleteTemplateRequest.precondition", "agentrun.node.v1.DeletePoolRequest.precondition",
		"agentrun.node.v1.PauseSandboxRequest.precondition", "agentrun.node.v1.ResumeSandboxRequest.precondition",
		"agentrun.node.v1.HibernateSandboxRequest.precondition", "agentrun.node.v1.ExtendSandboxRequest.precondition",
		"agentrun.node.v1.KillSandboxRequest.precondition", "agentrun.node.v1.SetNetworkPolicyRequest.precondition",
		"agentrun.node.v1.ForkSandboxRequest.precondition", "agentrun.node.v1.DeleteForkRequest.precondition",
		"agentrun.node.v1.CheckpointSandboxRequest.precondition", "agentrun.node.v1.DeleteCheckpointRequest.precondition",
	}},
}

// FeatureNames lists the features of this build.
func FeatureNames() (names []string) {
	for _, f := range features {
		names = append(names, f.name)
	}
	slices.Sort(names)
	return names
}
