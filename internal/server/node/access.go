package node

import (
	"context"
	"path"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// method describes a method, for checks before a call is served.
type method struct {
	operation access.Operation
	kind      sandbox.Kind
	// by is the field that names the object. A call without one is for a
	// namespace, or for the node.
	by protoreflect.Name
}

// methods has every method. Calls of methods that are missing are refused.
var methods = map[string]method{
	healthv1.Health_Check_FullMethodName: {operation: "getHealth"},
	healthv1.Health_List_FullMethodName:  {operation: "getHealth"},
	healthv1.Health_Watch_FullMethodName: {operation: "getHealth"},

	nodev1.Node_GetNode_FullMethodName:      {operation: "getNode"},
	nodev1.Node_Watch_FullMethodName:        {operation: "watch"},
	nodev1.Node_CordonNode_FullMethodName:   {operation: "cordonNode"},
	nodev1.Node_DrainNode_FullMethodName:    {operation: "drainNode"},
	nodev1.Node_UncordonNode_FullMethodName: {operation: "uncordonNode"},

	nodev1.Node_ApplyTemplate_FullMethodName:  {"putTemplate", sandbox.KindTemplate, "name"},
	nodev1.Node_GetTemplate_FullMethodName:    {"getTemplate", sandbox.KindTemplate, "name"},
	nodev1.Node_ListTemplates_FullMethodName:  {operation: "listTemplates"},
	nodev1.Node_DeleteTemplate_FullMethodName: {"deleteTemplate", sandbox.KindTemplate, "name"},

	nodev1.Node_GetTemplateLog_FullMethodName: {"getTemplateLog", sandbox.KindTemplate, "name"},

	nodev1.Node_ApplyPool_FullMethodName:  {"putPool", sandbox.KindPool, "name"},
	nodev1.Node_GetPool_FullMethodName:    {"getPool", sandbox.KindPool, "name"},
	nodev1.Node_ListPools_FullMethodName:  {operation: "listPools"},
	nodev1.Node_DeletePool_FullMethodName: {"deletePool", sandbox.KindPool, "name"},

	nodev1.Node_ClaimSandbox_FullMethodName:     {operation: "createSandbox"},
	nodev1.Node_GetSandbox_FullMethodName:       {"getSandbox", sandbox.KindSandbox, "name"},
	nodev1.Node_ListSandboxes_FullMethodName:    {operation: "listSandboxes"},
	nodev1.Node_PauseSandbox_FullMethodName:     {"pauseSandbox", sandbox.KindSandbox, "name"},
	nodev1.Node_ResumeSandbox_FullMethodName:    {"resumeSandbox", sandbox.KindSandbox, "name"},
	nodev1.Node_HibernateSandbox_FullMethodName: {"hibernateSandbox", sandbox.KindSandbox, "name"},
	nodev1.Node_ExtendSandbox_FullMethodName:    {"extendSandbox", sandbox.KindSandbox, "name"},
	nodev1.Node_KillSandbox_FullMethodName:      {"deleteSandbox", sandbox.KindSandbox, "name"},
	nodev1.Node_UseSandbox_FullMethodName:       {"useSandbox", sandbox.KindSandbox, "name"},
	nodev1.Node_GetSandboxByID_FullMethodName:   {operation: "findSandbox"},
	nodev1.Node_WatchToken_FullMethodName:       {operation: "findToken"},
	nodev1.Node_SetSandboxToken_FullMethodName:  {"putToken", sandbox.KindSandbox, "name"},
	nodev1.Node_ReleaseOwner_FullMethodName:     {operation: "releaseOwner"},
	nodev1.Node_GetSandboxStats_FullMethodName:  {"getStats", sandbox.KindSandbox, "name"},
	nodev1.Node_ListSandboxStats_FullMethodName: {operation: "listStats"},
	nodev1.Node_SetNetworkPolicy_FullMethodName: {"putNetworkPolicy", sandbox.KindSandbox, "name"},
	nodev1.Node_GetNetworkLog_FullMethodName:    {"getNetworkLog", sandbox.KindSandbox, "name"},

	nodev1.Node_GetNamespaceCA_FullMethodName: {operation: "getCA"},
	nodev1.Node_SetNamespaceCA_FullMethodName: {operation: "putCA"},

	nodev1.Node_ListImages_FullMethodName:          {operation: "listImages"},
	nodev1.Node_PublishImage_FullMethodName:        {operation: "publishImage"},
	nodev1.Node_UnpublishImage_FullMethodName:      {operation: "unpublishImage"},
	nodev1.Node_ListRegistryLogins_FullMethodName:  {operation: "listRegistryLogins"},
	nodev1.Node_SetRegistryLogin_FullMethodName:    {operation: "putRegistryLogin"},
	nodev1.Node_DeleteRegistryLogin_FullMethodName: {operation: "deleteRegistryLogin"},
	nodev1.Node_GetSnapshotOffer_FullMethodName:    {operation: "getSnapshotOffer"},
	nodev1.Node_FetchSnapshot_FullMethodName:       {"fetchSnapshot", sandbox.KindTemplate, "name"},
	nodev1.Node_GetSnapshotParts_FullMethodName:    {operation: "getSnapshotParts"},
	nodev1.Node_ReadSnapshot_FullMethodName:        {operation: "readSnapshot"},
	nodev1.Node_ApplySecret_FullMethodName:         {"putSecret", sandbox.KindSecret, "name"},
	nodev1.Node_PatchSecret_FullMethodName:         {"patchSecret", sandbox.KindSecret, "name"},
	nodev1.Node_GetSecret_FullMethodName:           {"getSecret", sandbox.KindSecret, "name"},
	nodev1.Node_ListSecrets_FullMethodName:         {operation: "listSecrets"},
	nodev1.Node_DeleteSecret_FullMethodName:        {"deleteSecret", sandbox.KindSecret, "name"},

	nodev1.Node_GetQuota_FullMethodName: {operation: "getQuota"},
	nodev1.Node_SetQuota_FullMethodName: {operation: "putQuota"},

	nodev1.Node_ForkSandbox_FullMethodName: {"forkSandbox", sandbox.KindSandbox, "source"},
	nodev1.Node_GetFork_FullMethodName:     {"getFork", sandbox.KindFork, "name"},
	nodev1.Node_ListForks_FullMethodName:   {operation: "listForks"},
	nodev1.Node_DeleteFork_FullMethodName:  {"deleteFork", sandbox.KindFork, "name"},

	nodev1.Node_CheckpointSandbox_FullMethodName: {"checkpointSandbox", sandbox.KindSandbox, "source"},
	nodev1.Node_GetCheckpoint_FullMethodName:     {"getCheckpoint", sandbox.KindCheckpoint, "name"},
	nodev1.Node_ListCheckpoints_FullMethodName:   {operation: "listCheckpoints"},
	nodev1.Node_DeleteCheckpoint_FullMethodName:  {"deleteCheckpoint", sandbox.KindCheckpoint, "name"},
	nodev1.Node_RestoreCheckpoint_FullMethodName: {"restoreCheckpoint", sandbox.KindCheckpoint, "checkpoint"},
}

// operationOf returns the operation of a method. For a method that is not listed,
// it returns the method's name, which is no operation's.
func operationOf(full string) access.Operation {
	if m, listed := methods[full]; listed {
		return m.operation
	}
	return access.Operation(server.Trimmed(path.Base(full)))
}

// checkListed refuses a method that is not listed.
func checkListed(full string) error {
	if _, listed := methods[full]; !listed {
		return sandbox.Errorf(sandbox.CodeDenied, "%s is served to nobody", path.Base(full))
	}
	return nil
}

// authoriseCall refuses a call that the principal may not make for the object
// in its message.
func (n *nodeAPI) authoriseCall(ctx context.Context, who access.Principal, full string, req any) error {
	if err := checkListed(full); err != nil {
		return err
	}
	m := methods[full]
	t := server.Target{Operation: m.operation, Kind: m.kind}
	if r, ok := req.(interface{ GetNamespace() string }); ok {
		if t.Namespace = r.GetNamespace(); t.Namespace == "" {
			t.Namespace = string(sandbox.DefaultNamespace)
		}
	}
	if r, ok := req.(interface{ GetAllNamespaces() bool }); ok && r.GetAllNamespaces() {
		if t.Namespace = ""; !who.In(access.AllNamespaces) {
			return sandbox.Errorf(sandbox.CodeDenied, "not all namespaces are yours").Try("Name the one that you mean")
		}
	}
	if message, ok := req.(proto.Message); ok && m.by != "" {
		reflected := message.ProtoReflect()
		t.Name = reflected.Get(reflected.Descriptor().Fields().ByName(m.by)).String()
	}
	return n.Authorise(ctx, who, t)
}
