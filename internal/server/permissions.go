package server

import (
	"context"
	"net/http"
	"strings"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
)

// operation is what is known about a route before it is served.
type operation struct {
	// verb is the operation id of api/openapi.yaml.
	verb string
	need access.Permission
	// own lets the token of a sandbox look at that sandbox, beside using it.
	own bool
	// audit writes down what only needs Read as well.
	audit bool
}

// audited reports whether the operation is in the audit log even if it is not
// refused: whatever changes something, reaches into a sandbox or is about keys.
func (o operation) audited() bool { return o.need > access.Read || o.audit }

// permissions has every route. One that is missing is served to nobody.
var permissions = map[string]operation{
	"GET /v1/version": {verb: "getVersion", need: access.Anyone},
	"GET /metrics":    {verb: "getMetrics", need: access.Administer},

	"GET /v1/namespaces/{namespace}/sandboxes/{name}/tunnels/{port}": {verb: "connectPort", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/terminal":      {verb: "createTerminal", need: access.Use},
	terminalRoute: {verb: "connectTerminal", need: access.Use},

	"GET /v1/namespaces/{namespace}/templates":            {verb: "listTemplates", need: access.Read},
	"GET /v1/namespaces/{namespace}/templates/{name}":     {verb: "getTemplate", need: access.Read},
	"PUT /v1/namespaces/{namespace}/templates/{name}":     {verb: "putTemplate", need: access.Change},
	"DELETE /v1/namespaces/{namespace}/templates/{name}":  {verb: "deleteTemplate", need: access.Change},
	"GET /v1/namespaces/{namespace}/templates/{name}/log": {verb: "getTemplateLog", need: access.Read},

	"GET /v1/namespaces/{namespace}/pools":           {verb: "listPools", need: access.Read},
	"GET /v1/namespaces/{namespace}/pools/{name}":    {verb: "getPool", need: access.Read},
	"PUT /v1/namespaces/{namespace}/pools/{name}":    {verb: "putPool", need: access.Change},
	"DELETE /v1/namespaces/{namespace}/pools/{name}": {verb: "deletePool", need: access.Change},

	"GET /v1/namespaces/{namespace}/sandboxes":                   {verb: "listSandboxes", need: access.Read},
	"POST /v1/namespaces/{namespace}/sandboxes":                  {verb: "createSandbox", need: access.Change},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}":            {verb: "getSandbox", need: access.Read, own: true},
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}":         {verb: "deleteSandbox", need: access.Change},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/pause":     {verb: "pauseSandbox", need: access.Change},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/resume":    {verb: "resumeSandbox", need: access.Change},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/hibernate": {verb: "hibernateSandbox", need: access.Change},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/extend":    {verb: "extendSandbox", need: access.Change},

	"POST /v1/namespaces/{namespace}/sandboxes/{name}/forks": {verb: "forkSandbox", need: access.Change},
	"GET /v1/namespaces/{namespace}/forks":                   {verb: "listForks", need: access.Read},
	"GET /v1/namespaces/{namespace}/forks/{name}":            {verb: "getFork", need: access.Read},
	"DELETE /v1/namespaces/{namespace}/forks/{name}":         {verb: "deleteFork", need: access.Change},

	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs":              {verb: "listExecs", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs":             {verb: "exec", need: access.Use},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}":         {verb: "getExec", need: access.Use},
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}":      {verb: "releaseExec", need: access.Use},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/output":  {verb: "attachExec", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/stdin":  {verb: "writeStdin", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/signal": {verb: "signalExec", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/resize": {verb: "resizeExec", need: access.Use},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/socket":  {verb: "connectExec", need: access.Use},

	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files":        {verb: "readFile", need: access.Use},
	"PUT /v1/namespaces/{namespace}/sandboxes/{name}/files":        {verb: "writeFile", need: access.Use},
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/files":     {verb: "removeFile", need: access.Use},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/stat":   {verb: "statFile", need: access.Use},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/list":   {verb: "listFiles", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/files/mkdir": {verb: "makeFolder", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/files/move":  {verb: "moveFile", need: access.Use},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/watch":  {verb: "watchFiles", need: access.Use},

	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code":                           {verb: "runCode", need: access.Use},
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/code/executions/{id}":         {verb: "releaseCode", need: access.Use},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/code/executions/{id}/output":     {verb: "attachCode", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code/executions/{id}/interrupt": {verb: "interruptCode", need: access.Use},
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts":                   {verb: "listContexts", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts":                  {verb: "createContext", need: access.Use},
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts/{id}":           {verb: "deleteContext", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts/{id}/restart":     {verb: "restartContext", need: access.Use},
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts/{id}/interrupt":   {verb: "interruptContext", need: access.Use},

	"POST /v1/namespaces/{namespace}/sandboxes/{name}/checkpoints": {verb: "checkpointSandbox", need: access.Change},
	"GET /v1/namespaces/{namespace}/checkpoints":                   {verb: "listCheckpoints", need: access.Read},
	"GET /v1/namespaces/{namespace}/checkpoints/{name}":            {verb: "getCheckpoint", need: access.Read},
	"DELETE /v1/namespaces/{namespace}/checkpoints/{name}":         {verb: "deleteCheckpoint", need: access.Change},
	"POST /v1/namespaces/{namespace}/checkpoints/{name}/restore":   {verb: "restoreCheckpoint", need: access.Change},

	"GET /v1/namespaces/{namespace}/sandboxes/{name}/stats": {verb: "getStats", need: access.Read},
	"GET /v1/namespaces/{namespace}/stats":                  {verb: "listStats", need: access.Read},
	"GET /v1/node":                                          {verb: "getNode", need: access.Administer},

	"GET /v1/namespaces/{namespace}/secrets":           {verb: "listSecrets", need: access.Read, audit: true},
	"GET /v1/namespaces/{namespace}/secrets/{name}":    {verb: "getSecret", need: access.Read, audit: true},
	"PUT /v1/namespaces/{namespace}/secrets/{name}":    {verb: "putSecret", need: access.Change},
	"PATCH /v1/namespaces/{namespace}/secrets/{name}":  {verb: "patchSecret", need: access.Change},
	"DELETE /v1/namespaces/{namespace}/secrets/{name}": {verb: "deleteSecret", need: access.Change},

	"GET /v1/namespaces/{namespace}/quota":    {verb: "getQuota", need: access.Read},
	"PUT /v1/namespaces/{namespace}/quota":    {verb: "putQuota", need: access.Administer},
	"DELETE /v1/namespaces/{namespace}/quota": {verb: "deleteQuota", need: access.Administer},

	"GET /v1/keys":         {verb: "listKeys", need: access.Administer},
	"POST /v1/keys":        {verb: "createKey", need: access.Administer},
	"DELETE /v1/keys/{id}": {verb: "revokeKey", need: access.Administer},
}

// target is what a request is about, as its path says; nothing of it is checked.
type target struct {
	operation
	pattern         string
	kind            string // of object, as in the path
	namespace, name string
	object          string // for the audit log
}

// findTarget takes a path apart by the pattern that it was routed by.
func findTarget(pattern, path string) target {
	t := target{operation: permissions[pattern], pattern: pattern}
	_, route, _ := strings.Cut(pattern, " ")
	parts := strings.Split(path, "/")
	object, before, named := []string{}, "", 0
	for i, part := range strings.Split(route, "/") {
		if i >= len(parts) || strings.HasSuffix(part, "...}") {
			break // the rest is another server's matter
		}
		object = append(object, parts[i])
		switch part {
		case "{namespace}":
			t.namespace, object = parts[i], object[:0]
		case "{name}":
			t.name, t.kind = parts[i], before
		}
		if strings.HasPrefix(part, "{") {
			named = len(object)
		}
		before = part
	}
	t.object = strings.TrimPrefix(strings.Join(object[:named], "/"), "/v1/")
	return t
}

// authorise refuses what a principal may not do with what the path names. It is
// the one place where that is decided.
func (a *api) authorise(ctx context.Context, p access.Principal, t target) error {
	allowed := p.May(t.need) || t.own && p.Sandbox != ""
	if !allowed {
		return sandbox.Errorf(codeDenied, "%s is not for the role %s", t.verb, p.Role).
			Try("Use a key with more rights; docs/security.md has the table")
	}
	if t.namespace == "" {
		return nil
	}
	n, err := sandbox.ParseNamespace(t.namespace)
	if err != nil {
		return err
	}
	if t.name == "" {
		if p.In(n) && p.Sandbox == "" {
			return nil
		}
		return deniedIn(n)
	}
	k, err := key(t.namespace, t.name)
	if err != nil {
		return err
	}
	switch {
	case p.Sandbox != "":
		if s, err := a.Service.Sandbox(ctx, k); err != nil || t.kind != "sandboxes" || s.ID != p.Sandbox {
			return hidden(t.kind, k)
		}
		return nil
	case p.In(n):
		return nil
	case strings.HasPrefix(t.pattern, http.MethodPut+" ") && t.need == access.Change:
		return deniedIn(n) // it would be made
	}
	return hidden(t.kind, k)
}

// deniedIn says nothing about what is in a namespace, nor whether it is used.
func deniedIn(n sandbox.Namespace) error {
	return sandbox.Errorf(codeDenied, "namespace %s is not one of yours", n).Try("Use a key of that namespace")
}

// hidden is what is said of an object that does not exist.
func hidden(kind string, k sandbox.Key) error {
	if kind == "sandboxes" {
		return sandbox.NotFound(sandbox.KindSandbox, k)
	}
	return sandbox.NotFound(sandbox.Kind(strings.TrimSuffix(kind, "s")), k)
}
