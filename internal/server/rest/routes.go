package rest

import (
	"strings"

	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// routes has the operation of each route. Requests for routes that are missing
// are refused.
var routes = map[string]access.Operation{
	"GET /v1/version": "getVersion",
	"GET /metrics":    "getMetrics",

	"GET /v1/namespaces/{namespace}/sandboxes/{name}/tunnels/{port}": "connectPort",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/terminal":      "createTerminal",
	terminalRoute: "connectTerminal",

	"GET /v1/namespaces/{namespace}/templates":            "listTemplates",
	"GET /v1/namespaces/{namespace}/templates/{name}":     "getTemplate",
	"PUT /v1/namespaces/{namespace}/templates/{name}":     "putTemplate",
	"DELETE /v1/namespaces/{namespace}/templates/{name}":  "deleteTemplate",
	"GET /v1/namespaces/{namespace}/templates/{name}/log": "getTemplateLog",

	"GET /v1/namespaces/{namespace}/pools":           "listPools",
	"GET /v1/namespaces/{namespace}/pools/{name}":    "getPool",
	"PUT /v1/namespaces/{namespace}/pools/{name}":    "putPool",
	"DELETE /v1/namespaces/{namespace}/pools/{name}": "deletePool",

	"GET /v1/namespaces/{namespace}/sandboxes":                   "listSandboxes",
	"POST /v1/namespaces/{namespace}/sandboxes":                  "createSandbox",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}":            "getSandbox",
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}":         "deleteSandbox",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/pause":     "pauseSandbox",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/resume":    "resumeSandbox",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/hibernate": "hibernateSandbox",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/extend":    "extendSandbox",

	"PUT /v1/namespaces/{namespace}/sandboxes/{name}/network/policy":    "putNetworkPolicy",
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/network/policy": "deleteNetworkPolicy",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/network/log":       "getNetworkLog",

	"POST /v1/namespaces/{namespace}/sandboxes/{name}/forks": "forkSandbox",
	"GET /v1/namespaces/{namespace}/forks":                   "listForks",
	"GET /v1/namespaces/{namespace}/forks/{name}":            "getFork",
	"DELETE /v1/namespaces/{namespace}/forks/{name}":         "deleteFork",

	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs":              "listExecs",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs":             "exec",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}":         "getExec",
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}":      "releaseExec",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/output":  "attachExec",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/stdin":  "writeStdin",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/signal": "signalExec",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/resize": "resizeExec",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/execs/{id}/socket":  "connectExec",

	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files":        "readFile",
	"PUT /v1/namespaces/{namespace}/sandboxes/{name}/files":        "writeFile",
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/files":     "removeFile",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/stat":   "statFile",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/list":   "listFiles",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/files/mkdir": "makeFolder",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/files/move":  "moveFile",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/files/watch":  "watchFiles",

	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code":                           "runCode",
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/code/executions/{id}":         "releaseCode",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/code/executions/{id}/output":     "attachCode",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code/executions/{id}/interrupt": "interruptCode",
	"GET /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts":                   "listContexts",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts":                  "createContext",
	"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts/{id}":           "deleteContext",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts/{id}/restart":     "restartContext",
	"POST /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts/{id}/interrupt":   "interruptContext",

	"POST /v1/namespaces/{namespace}/sandboxes/{name}/checkpoints": "checkpointSandbox",
	"GET /v1/namespaces/{namespace}/checkpoints":                   "listCheckpoints",
	"GET /v1/namespaces/{namespace}/checkpoints/{name}":            "getCheckpoint",
	"DELETE /v1/namespaces/{namespace}/checkpoints/{name}":         "deleteCheckpoint",
	"POST /v1/namespaces/{namespace}/checkpoints/{name}/restore":   "restoreCheckpoint",

	"GET /v1/namespaces/{namespace}/sandboxes/{name}/stats": "getStats",
	"GET /v1/namespaces/{namespace}/stats":                  "listStats",
	"GET /v1/node":                                          "getNode",
	"POST /v1/node/cordon":                                  "cordonNode",
	"POST /v1/node/drain":                                   "drainNode",
	"POST /v1/node/uncordon":                                "uncordonNode",

	"GET /v1/namespaces/{namespace}/secrets":           "listSecrets",
	"GET /v1/namespaces/{namespace}/secrets/{name}":    "getSecret",
	"PUT /v1/namespaces/{namespace}/secrets/{name}":    "putSecret",
	"PATCH /v1/namespaces/{namespace}/secrets/{name}":  "patchSecret",
	"DELETE /v1/namespaces/{namespace}/secrets/{name}": "deleteSecret",

	"GET /v1/namespaces/{namespace}/ca": "getCA",
	"PUT /v1/namespaces/{namespace}/ca": "putCA",

	"GET /v1/namespaces/{namespace}/images": "listImages",
	"POST /v1/images/publish":               "publishImage",
	"POST /v1/images/unpublish":             "unpublishImage",

	"GET /v1/namespaces/{namespace}/registries":    "listRegistryLogins",
	"PUT /v1/namespaces/{namespace}/registries":    "putRegistryLogin",
	"DELETE /v1/namespaces/{namespace}/registries": "deleteRegistryLogin",

	"GET /v1/namespaces/{namespace}/quota":    "getQuota",
	"PUT /v1/namespaces/{namespace}/quota":    "putQuota",
	"DELETE /v1/namespaces/{namespace}/quota": "deleteQuota",

	"GET /v1/keys":         "listKeys",
	"POST /v1/keys":        "createKey",
	"DELETE /v1/keys/{id}": "revokeKey",
}

// target is the target of a request, as its path names it. No part is checked.
type target struct {
	server.Target
	object string // for the audit log
}

// kinds has the kinds of objects by their names in paths.
var kinds = map[string]sandbox.Kind{
	"templates": sandbox.KindTemplate, "pools": sandbox.KindPool, "sandboxes": sandbox.KindSandbox,
	"forks": sandbox.KindFork, "checkpoints": sandbox.KindCheckpoint, "secrets": sandbox.KindSecret,
}

// findTarget parses a path by the pattern that it was routed by.
func findTarget(pattern, path string) target {
	t := target{Target: server.Target{Operation: routes[pattern]}}
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
			t.Namespace, object = parts[i], object[:0]
		case "{name}":
			t.Name, t.Kind = parts[i], kinds[before]
		}
		if strings.HasPrefix(part, "{") {
			named = len(object)
		}
		before = part
	}
	t.object = strings.TrimPrefix(strings.Join(object[:named], "/"), "/v1/")
	return t
}
