package servertest_test

import (
	"testing"

	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server/servertest"
)

// TestManager: a node's manager passes the suite.
func TestManager(t *testing.T) {
	servertest.Run(t, servertest.Target{
		Service:  managertest.New(t).Manager,
		Owns:     true,
		Template: sandbox.TemplateSpec{Image: "python", MilliCPUs: sandbox.DefaultMilliCPUs, Memory: sandbox.DefaultMemory},
	})
}
