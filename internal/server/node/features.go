package node

import (
	"slices"

	"google.golang.org/protobuf/reflect/protoreflect"

	nodev1 "agentrun.dev/api/node/v1"
)

// feature is a part of the API that its first version did not have. Messages with fields
// that a daemon does not know are refused, so a client asks GetNode for the features, and
// sends only what came with those. What comes with answers needs no feature: clients ignore
// fields that they do not know.
type feature struct {
	name string
	// methods and fields of requests came with it.
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

// FeatureNames are those of this build.
func FeatureNames() (names []string) {
	for _, f := range features {
		names = append(names, f.name)
	}
	slices.Sort(names)
	return names
}
