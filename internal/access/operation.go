package access

import (
	"maps"
	"slices"
)

// Operation is something that a node can be asked for, over whatever API. Those of
// REST have the name that api/openapi.yaml gives them.
type Operation string

// Rule says who an operation is for, and what is written down of it.
type Rule struct {
	Need Permission
	// Own lets the token of a sandbox look at that sandbox, beside using it.
	Own bool
	// Makes says that what is named and does not exist is made.
	Makes bool
	// Audit writes down what only needs Read as well.
	Audit bool
	// Nodes lets the certificates of nodes call it, beside those of controllers and
	// gateways. It is for what nodes ask of each other.
	Nodes bool
}

// For reports whether a component may call the operation at all, for whomever.
func (r Rule) For(c Component) bool { return c.Role != RoleNode || r.Nodes }

// Audited reports whether the operation is in the audit log even if it is not
// refused: whatever changes something, reaches into a sandbox or is about keys.
func (r Rule) Audited() bool { return r.Need > Read || r.Audit }

// Rule is that of the operation. One that is not listed needs None, which nobody has.
func (o Operation) Rule() Rule { return operations[o] }

// Operations are all that are listed, sorted.
func Operations() []Operation { return slices.Sorted(maps.Keys(operations)) }

// operations has every operation. One that is missing is served to nobody.
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
