package nodeconv

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"agentrun.dev/internal/sandbox"
)

// TestHostileText: a sandbox, or the process that runs it, may report its end in bytes that
// are not UTF-8. Lists and watches include it nevertheless.
func TestHostileText(t *testing.T) {
	const said = "panic: \xff\xfe\x00"
	for name, m := range map[string]proto.Message{
		"a detail":            FromSandbox(sandbox.Sandbox{Detail: said}),
		"a silence":           FromSandbox(sandbox.Sandbox{Unresponsive: said}),
		"a child's problem":   FromFork(sandbox.Fork{Children: []sandbox.ForkOutcome{{Problem: said}}}),
		"a build's problem":   FromTemplate(sandbox.Template{}, []sandbox.Build{{Problem: said}}),
		"a pool's problem":    FromPool(sandbox.Pool{}, sandbox.PoolStatus{Problem: said}),
		"a problem of drains": FromNode(sandbox.NodeStatus{Cordon: &sandbox.Cordon{Problems: []sandbox.DrainProblem{{Problem: said}}}}),
		"an error":            FromError(&sandbox.Error{Message: said, Cause: said, Remediation: said}),
	} {
		if _, err := proto.Marshal(m); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
