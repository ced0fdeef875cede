package access

import (
	"maps"
	"slices"
)

// Operation is an operation of a node's APIs. Those of REST have the name that
// api/openapi.yaml gives them.
type Operation string

// Rule says which callers an operation is for, and whether the audit log
// records it.
type Rule struct {
	Need Permission
	// Own lets the token of a sandbox look at that sandbox, beside using it.
	Own bool
	// Makes says that the operation makes the named object if it does not
	// exist.
	Makes bool
	// Audit records the operation although it only needs Read.
	Audit bool
	// Nodes lets the certificates of nodes call it, beside those of controllers and
	// gateways. It is for requests between nodes.
	Nodes bool
}

// For reports whether a component may call the operation at all, for any
// principal.
func (r Rule) For(c Component) bool { return c.Role != RoleNode || r.Nodes }

// Audited reports whether the audit log records the operation even if it is not
// refused. These operations change something, reach into a sandbox or concern
// the node, its keys or credentials.
func (r Rule) Audited() bool { return r.Need > Read || r.Audit }

// Rule returns the operation's rule. An operation that is not listed needs None,
// which no role has.
func (o Operation) Rule() Rule { return operations[o] }

// Operations lists all operations, sorted.
func Operations() []Operation { return slices.Sorted(maps.Keys(operations)) }

// operations has the rule of every operation. Requests for operations that are
// missing are refused.
var operations = map[Operation]Rule{
	"getVersion": {Need: Anyone},
	"getHealth":  {Need: Anyone, Nodes: true},
	"getMetrics": {Need: Administer},

	"connectPort":     {Need: Use},
	"usePort":         {Need: Use},
	"createTerminal":  {Need: Use},
	"connectTerminal": {Need: Use},

	"listTemplates":  {Need: Read},
	"getTemplate":    {Need: Read},
	"putTemplate":    {Need: Change, Makes: true},
	"deleteTemplate": {Need: Change},
	"getTemplateLog": {Need: Read},

	"listPools":  {Need: Read},
	"getPool":    {Need: Read},
	"putPool":    {Need: Change, Makes: true},
	"deletePool": {Need: Change},

	"listSandboxes":    {Need: Read},
	"createSandbox":    {Need: Change},
	"getSandbox":       {Need: Read, Own: true},
	"deleteSandbox":    {Need: Change},
	"pauseSandbox":     {Need: Change},
	"resumeSandbox":    {Need: Change},
	"hibernateSandbox": {Need: Change},
	"extendSandbox":    {Need: Change},
	"putToken":         {Need: Change},
	"releaseOwner":     {Need: Change},

	"putNetworkPolicy":    {Need: Change},
	"deleteNetworkPolicy": {Need: Change},
	"getNetworkLog":       {Need: Read, Own: true},

	"forkSandbox": {Need: Change},
	"listForks":   {Need: Read},
	"getFork":     {Need: Read},
	"deleteFork":  {Need: Change},

	// Streams of gRPC: each use of one is an operation of its own.
	"useSandbox": {Need: Use},
	// These find the sandbox of an id or of a token.
	"findSandbox": {Need: Read},
	"findToken":   {Need: Read},

	"listExecs":   {Need: Use},
	"exec":        {Need: Use},
	"getExec":     {Need: Use},
	"releaseExec": {Need: Use},
	"attachExec":  {Need: Use},
	"writeStdin":  {Need: Use},
	"signalExec":  {Need: Use},
	"resizeExec":  {Need: Use},
	"connectExec": {Need: Use},

	"readFile":   {Need: Use},
	"writeFile":  {Need: Use},
	"removeFile": {Need: Use},
	"statFile":   {Need: Use},
	"listFiles":  {Need: Use},
	"makeFolder": {Need: Use},
	"moveFile":   {Need: Use},
	"watchFiles": {Need: Use},

	"runCode":          {Need: Use},
	"releaseCode":      {Need: Use},
	"attachCode":       {Need: Use},
	"interruptCode":    {Need: Use},
	"listContexts":     {Need: Use},
	"createContext":    {Need: Use},
	"deleteContext":    {Need: Use},
	"restartContext":   {Need: Use},
	"interruptContext": {Need: Use},

	"checkpointSandbox": {Need: Change},
	"listCheckpoints":   {Need: Read},
	"getCheckpoint":     {Need: Read},
	"deleteCheckpoint":  {Need: Change},
	"restoreCheckpoint": {Need: Change},

	"getStats":  {Need: Read},
	"listStats": {Need: Read},
	"getNode":   {Need: Observe},
	"watch":     {Need: Read},

	"getSnapshotOffer": {Need: Observe},
	"fetchSnapshot":    {Need: Administer},
	"getSnapshotParts": {Need: Replicate, Nodes: true},
	"readSnapshot":     {Need: Replicate, Nodes: true},

	"cordonNode":   {Need: Administer},
	"drainNode":    {Need: Administer},
	"uncordonNode": {Need: Administer},

	"listSecrets":  {Need: Read, Audit: true},
	"getSecret":    {Need: Read, Audit: true},
	"putSecret":    {Need: Change, Makes: true},
	"patchSecret":  {Need: Change},
	"deleteSecret": {Need: Change},

	"listImages":     {Need: Read},
	"publishImage":   {Need: Administer},
	"unpublishImage": {Need: Administer},

	"listRegistryLogins":  {Need: Read, Audit: true},
	"putRegistryLogin":    {Need: Change, Makes: true},
	"deleteRegistryLogin": {Need: Change},

	"getCA": {Need: Read},
	"putCA": {Need: Change},

	"getQuota":    {Need: Read},
	"putQuota":    {Need: Administer},
	"deleteQuota": {Need: Administer},

	"listKeys":  {Need: Administer},
	"createKey": {Need: Administer},
	"revokeKey": {Need: Administer},
}
