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
	{name: "list-all-namespaces", fields: []protoreflect.FullName{
		"agentrun.node.v1.ListTemplatesRequest.all_namespaces", "agentrun.node.v1.ListPoolsRequest.all_namespaces",
		"agentrun.node.v1.ListSandboxesRequest.all_namespaces", "agentrun.node.v1.ListForksRequest.all_namespaces",
		"agentrun.node.v1.ListCheckpointsRequest.all_namespaces",
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
